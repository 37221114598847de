"""What an encoder of pictures costs: a prefill through its own layers, without a cache."""

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.images import Encoder
from crosstie.perf.hardware import Array, Hardware, attainable, half_precision_flop_per_s
from crosstie.perf.step import ACTIVATION_BYTES, all_reduce_s, smooth_maximum

# Kernels of a layer: four products, attention, two norms, an activation, two sums.
_KERNELS = 10.0


def encode_s(hardware: Hardware, encoder: Encoder, patches: float, parts: float) -> Array:
    """Seconds for so many parts of pictures at once, each of so many patches, split over tensor-parallel ranks;
    shape (deployments, 1). Encoders are kept in 16 bits."""
    if parts <= 0:
        return np.zeros_like(hardware.tp)
    rows = patches * parts
    weights = encoder.hidden * (4.0 * encoder.hidden + encoder.products * encoder.intermediate)
    rate = hardware.column(half_precision_flop_per_s) * attainable(
        "compute", hardware.column(_compute_share), hardware.factors["compute"]
    )
    products_s = 2.0 * weights * rows / hardware.tp / rate
    traffic = weights * ACTIVATION_BYTES / hardware.tp / hardware.memory_bytes_per_s
    traffic = traffic + rows * 8.0 * encoder.hidden * ACTIVATION_BYTES / hardware.elementwise_bytes_per_s
    # Every patch looks at all of its part.
    attention_s = 4.0 * patches * encoder.hidden * rows / hardware.tp / hardware.attention_rates("bf16")[0]
    message = np.asarray(rows * encoder.hidden * ACTIVATION_BYTES)
    layer_s = smooth_maximum(products_s, traffic) + attention_s + _KERNELS * hardware.kernel_s
    return np.asarray(encoder.layers * (layer_s + 2.0 * all_reduce_s(hardware, message, hardware.tp)))


def _compute_share(deployment: Deployment) -> float:
    constants = deployment.efficiency.compute
    return (constants.get("bf16") or constants["fp16"]).value
