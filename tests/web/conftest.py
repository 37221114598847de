"""Fixtures of the tests of pages and pictures."""

from tests.planned_once import planned_once as planned_once
