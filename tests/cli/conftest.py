"""Fixtures of the tests of commands."""

from tests.planned_once import planned_once as planned_once
