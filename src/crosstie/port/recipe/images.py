"""The image that a release of an engine is published as, and what a container of it must be let have."""

import re

from packaging.version import Version

from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput
from crosstie.port.preflight.matrix import EngineBuild, builds
from crosstie.port.recipe.recipe import Container

# SGLang builds one image for each generation; the tag's last part.
_GENERATIONS = {"gfx942": "-mi30x", "gfx950": "-mi35x"}


def image_of(engine: str, release: str, accelerator: Accelerator) -> tuple[str, str]:
    """The image, and where that name comes from."""
    version, amd = Version(release), accelerator.vendor == "AMD"
    known = [build for build in builds() if build.engine == engine and _named(build, amd)]
    own = next((build for build in known if Version(build.version) == version), None)
    if own is not None:
        moves = "; the tag moves with every build: pin it by its digest" if own.version not in _named(own, amd) else ""
        return _chosen(_named(own, amd), accelerator), f"{own.source}, released {own.released}{moves}"
    like = next((build for build in known if build.version in _named(build, amd) or engine == "llama.cpp"), None)
    if like is None:
        raise BadInput(f"no image of {engine} is known for {accelerator.vendor}: name one with --image")
    name = _named(like, amd).replace(like.version, release)
    why = f"named as that of {like.version} is ({like.source}); no registry was asked whether it is there"
    return _chosen(name, accelerator), why


def _named(build: EngineBuild, amd: bool) -> str:
    return build.rocm_image if amd else build.cuda_image


def _chosen(name: str, accelerator: Accelerator) -> str:
    """`...-mi30x|-mi35x` is two tags, of which the chip's own is taken."""
    if "|" not in name:
        return name
    stem = re.sub(r"-\w+\|.*", "", name)
    isa = accelerator.chip.isa.value
    if isa not in _GENERATIONS:
        raise BadInput(
            f"{stem}: no image is built for {isa}; {', '.join(_GENERATIONS)} have one. Name one with --image"
        )
    return stem + _GENERATIONS[isa]


def container_for(vendor: str, gpus: int, *, between_machines: bool) -> Container:
    amd = vendor == "AMD"
    devices = (("/dev/kfd", "ROCm's compute driver"), ("/dev/dri", "the GPUs themselves, as render nodes"))
    capabilities = (("SYS_PTRACE", "RCCL's ranks map each other's memory"),)
    groups = (("video", "may open /dev/kfd and /dev/dri"), ("render", "the same, on newer distributions"))
    ipc = (("ipc", "ranks of a replica hand tensors over through shared memory"),)
    # Where ranks are on several machines.
    network = (("network", "ranks and caches go between machines, over RDMA where it is there"),)
    ports = (("/dev/infiniband", "the ports of RDMA; take it out where machines have none"),)
    return Container(
        devices=devices * amd + ports * between_machines,
        groups=groups * amd,
        capabilities=capabilities * amd + (("IPC_LOCK", "RDMA pins memory"),) * between_machines,
        host=ipc * (gpus > 1) + network * between_machines,
        unconfined="the usual profile refuses memory mappings that ROCm makes" * amd,
        nvidia="" if amd else "NVIDIA's container toolkit puts the driver's libraries into the container",
        memlock="RDMA pins memory" * between_machines,
    )
