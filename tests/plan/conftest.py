"""The model by itself: constants as the catalog has them, without what calibration makes of them."""

import pytest

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog([], calibration=empty())
