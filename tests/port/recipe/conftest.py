"""Fixtures of the tests of recipes."""

from collections.abc import Iterator
from functools import cache

import pytest
from kubernetes_validate import utils
from tests.planned_once import planned_once as planned_once


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads all definitions of Kubernetes again for each document."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield
