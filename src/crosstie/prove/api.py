"""Prove, from Python: predictions against measured results, and a calibration that has learnt from them."""

from pathlib import Path

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.calibration import calibrate as learning, validate as comparing
from crosstie.prove.calibration.validate import Validation


def validate(*results: str | Path, catalog: Catalog | None = None) -> Validation:
    """Every row of results files (CSV, gzipped or not) predicted the way it was measured, beside what was measured.

    Rows that cannot be predicted are in `missed`, each with its reason; `docs/validate.md` has the columns.
    """
    return comparing.validate(catalog or Catalog(), results)


def calibrate(
    *results: str | Path, alone: bool = False, quick: bool = False, on_progress: OnProgress = no_progress
) -> Calibration:
    """The model's constants fitted to results files and documents of `crosstie probe`, and how wrong it is then.

    They are learnt from together with what Crosstie ships, which takes minutes; or `alone`; or `quick`, beside the
    calibration that Crosstie ships, as the command does. `Catalog(calibration=...)` estimates by it; `calibration_text`
    writes the file that the user's catalog folder takes.
    """
    made = learning.calibrate(results, with_shipped=not alone, quick=quick, on_progress=on_progress)
    return made.calibration
