"""Recipes as what somebody runs: one module a form, each from a recipe to files by name."""

from collections.abc import Callable

from crosstie.core.errors import BadInput
from crosstie.port.recipe.forms.compose import compose
from crosstie.port.recipe.forms.kubernetes import kubernetes
from crosstie.port.recipe.forms.schedulers import ray_serve, skypilot, slurm
from crosstie.port.recipe.forms.serving_platforms import kserve, rayservice
from crosstie.port.recipe.forms.shell import shell, systemd
from crosstie.port.recipe.recipe import CLAIM, IMAGE, Recipe

# Forms whose GPUs are one process's own.
_GIVEN_TO_ONE = ("skypilot", "ray", "slurm", "kubernetes", "kserve", "rayservice")
# Forms whose pods may mount images and claims.
_IN_CLUSTER = ("kubernetes", "kserve")


def render(recipe: Recipe, form: str, *, bare: bool = False) -> dict[str, str]:
    """Files by name. Raises BadInput where the form has no way to say it."""
    if bare and form not in BARE:
        raise BadInput(f"--bare is for {', '.join(BARE)}; {form} runs containers")
    if recipe.shares_gpus and form in _GIVEN_TO_ONE:
        raise BadInput(f"{recipe.name}: models share GPUs, which {form} gives to one process; shell and compose can")
    inside = next((mount.source for mount in recipe.mounts if mount.source.startswith((IMAGE, CLAIM))), "")
    if inside and form not in _IN_CLUSTER:
        raise BadInput(f"{recipe.name}: weights at {inside} are a cluster's: --as {' or '.join(_IN_CLUSTER)}")
    return FORMS[form](recipe, bare)


# A recipe, and whether the engine is installed rather than taken from its image, in; files by name out.
FORMS: dict[str, Callable[[Recipe, bool], dict[str, str]]] = {
    "shell": shell,
    "compose": compose,
    "systemd": systemd,
    "skypilot": skypilot,
    "ray": ray_serve,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "kserve": kserve,
    "rayservice": rayservice,
}
# Forms that can do without a container.
BARE = ("shell", "systemd", "slurm")
