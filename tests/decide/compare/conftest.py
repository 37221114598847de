"""Reasons follow from the model by itself, without calibration."""

import pytest

from crosstie.catalog.library import Catalog


@pytest.fixture(scope="session")
def catalog(uncalibrated: Catalog) -> Catalog:
    return uncalibrated
