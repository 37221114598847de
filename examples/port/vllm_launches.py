"""Launches vLLM's Triton kernels through vLLM's own wrappers: `crosstie preflight kernels vllm_launches.py`.

Shapes are those of Llama-3-8B (attention, cache, norm), Qwen3-30B-A3B (experts) and DeepSeek-V3 at TP 8 (block-scaled
FP8, MLA). The wrappers are those of vLLM 0.32.0; another version may have moved them, and then a launcher stops with
the import that failed. Copy this file and change it.
"""

import sys
import types
from typing import Any

import torch
import vllm.platforms

_TOKENS = 64
_PAGE = 16
_PAGES = 256


def crosstie_launch_attention(device: Any) -> None:
    """Prefill and decode of 32 query heads on 8 KV heads of 128, cache in bf16 and in fp8."""
    fp8 = _platform(device).fp8_dtype()
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    heads, kv_heads, size, sequences, segments = 32, 8, 128, 4, 16
    for cache in (torch.bfloat16, fp8):
        kv = torch.empty(_PAGES, _PAGE, kv_heads, size, dtype=cache)
        scale = torch.ones(sequences, kv_heads)
        for tokens, longest in ((_TOKENS, 16), (sequences, 1)):
            q = torch.empty(tokens, heads, size, dtype=torch.bfloat16)
            unified_attention(
                q=q, k=kv, v=kv, out=torch.empty_like(q),
                cu_seqlens_q=torch.zeros(sequences + 1, dtype=torch.int32), max_seqlen_q=longest,
                seqused_k=torch.full((sequences,), 512, dtype=torch.int32), max_seqlen_k=512,
                softmax_scale=size**-0.5, causal=True, window_size=(-1, -1),
                block_table=torch.zeros(sequences, 64, dtype=torch.int32), softcap=0.0,
                q_descale=None, k_descale=scale, v_descale=scale,
                seq_threshold_3D=128, num_par_softmax_segments=segments,
                softmax_segm_output=torch.empty(sequences, heads, segments, size),
                softmax_segm_max=torch.empty(sequences, heads, segments),
                softmax_segm_expsum=torch.empty(sequences, heads, segments),
            )  # fmt: skip


def crosstie_launch_cache(device: Any) -> None:
    """New keys and values into the paged cache, in bf16 and in fp8."""
    fp8 = _platform(device).fp8_dtype()
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    new = torch.empty(_TOKENS, 8, 128, dtype=torch.bfloat16)
    slots = torch.zeros(_TOKENS, dtype=torch.int64)
    for kind, dtype in (("auto", torch.bfloat16), ("fp8", fp8)):
        kv = torch.empty(_PAGES, _PAGE, 8, 128, dtype=dtype)
        triton_reshape_and_cache_flash(new, new, kv, kv.clone(), slots, kind, torch.ones(1), torch.ones(1))


def crosstie_launch_mla_decode(device: Any) -> None:
    """One latent KV head of 512 + 64, 16 query heads of one rank."""
    _platform(device)
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    sequences, heads, latent, rope, splits = 4, 16, 512, 64, 4
    kv = torch.empty(_PAGES, _PAGE, 1, latent + rope, dtype=torch.bfloat16)
    decode_attention_fwd(
        torch.empty(sequences, heads, latent + rope, dtype=torch.bfloat16), kv, kv[..., :latent],
        torch.empty(sequences, heads, latent, dtype=torch.bfloat16), torch.empty(sequences, heads),
        torch.zeros(sequences, 64, dtype=torch.int32), torch.full((sequences,), 512, dtype=torch.int32),
        torch.empty(sequences, heads, splits, latent + 1), splits, (latent + rope) ** -0.5, _PAGE, is_mla=True,
    )  # fmt: skip


def crosstie_launch_fp8_block_gemm(device: Any) -> None:
    """Activations to fp8 in groups of 128, and a GEMM with 128 x 128 scales."""
    fp8 = _platform(device).fp8_dtype()
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        per_token_group_quant_fp8,
        w8a8_triton_block_scaled_mm,
    )

    rows, inner, outer, block = _TOKENS, 7168, 2112, 128
    # A view that is not contiguous takes vLLM's Triton kernel instead of its C++ one.
    per_token_group_quant_fp8(torch.empty(rows, 2 * inner, dtype=torch.bfloat16)[:, :inner], block)
    w8a8_triton_block_scaled_mm(
        torch.empty(rows, inner, dtype=fp8), torch.empty(outer, inner, dtype=fp8),
        torch.empty(rows, inner // block), torch.empty(-(-outer // block), inner // block), [block, block],
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def crosstie_launch_experts(device: Any) -> None:
    """128 experts of 768, top 8: in bf16, and in fp8 with 128 x 128 scales, with vLLM's configuration for each."""
    fp8 = _platform(device).fp8_dtype()
    import vllm.model_executor.layers.fused_moe.fused_moe as moe
    from vllm.triton_utils import tl

    experts, hidden, inner, chosen = 128, 2048, 768, 8
    for dtype, block in ((torch.bfloat16, None), (fp8, [128, 128])):
        first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
        config = moe.try_get_optimal_moe_config(
            first, second, chosen, None if block is None else "fp8_w8a8", _TOKENS, block
        )
        padded = _TOKENS * chosen + experts * (config["BLOCK_SIZE_M"] - 1)
        scales = {
            "A_scale": torch.empty(_TOKENS, hidden // 128),
            "B_scale": torch.empty(experts, 2 * inner // 128, hidden // 128),
        }
        moe.invoke_fused_moe_triton_kernel(
            A=torch.empty(_TOKENS, hidden, dtype=dtype), B=torch.empty(first, dtype=dtype),
            C=torch.empty(_TOKENS, chosen, 2 * inner, dtype=torch.bfloat16),
            topk_weights=torch.empty(_TOKENS, chosen), sorted_token_ids=torch.zeros(padded, dtype=torch.int32),
            expert_ids=torch.zeros(padded // config["BLOCK_SIZE_M"] + 1, dtype=torch.int32),
            num_tokens_post_padded=torch.zeros(1, dtype=torch.int32), mul_routed_weight=False, top_k=chosen,
            config=config, compute_type=tl.bfloat16, use_fp8_w8a8=block is not None, use_int8_w8a8=False,
            use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False, block_shape=block,
            **(scales if block else {"A_scale": None, "B_scale": None}),
        )  # fmt: skip


def crosstie_launch_norm(device: Any) -> None:
    _platform(device)
    from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

    hidden = 4096
    rms_norm_batch_invariant(
        torch.empty(_TOKENS, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    )


def _platform(device: Any) -> Any:
    """vLLM's own class for the target's platform, before anything imports `current_platform`."""
    if vllm.platforms._current_platform is None or vllm.platforms._current_platform.is_cpu():
        # A build for the processor would switch Triton off, and lacks the extensions that the classes import.
        vllm.platforms.vllm_version_matches_substr = lambda _: False
        for extension in ("vllm._C_stable_libtorch", "vllm._C", "vllm.vllm_flash_attn._vllm_fa2_C"):
            sys.modules.setdefault(extension, types.ModuleType(extension))
        kind = _rocm() if device.backend == "hip" else _cuda()
        # These ask a management library, which needs the card.
        kind.get_device_name = classmethod(lambda *_, **__: device.name)
        kind.get_device_total_memory = classmethod(lambda *_, **__: device.memory_bytes)
        vllm.platforms._current_platform = kind()
    return vllm.platforms._current_platform


def _rocm() -> Any:
    from vllm.platforms.rocm import RocmPlatform

    return RocmPlatform


def _cuda() -> Any:
    import vllm._custom_ops as operations
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    # Questions to the compiled extension; "no" leads to Triton.
    for name in dir(operations):
        if name.startswith("cutlass_") and "_support" in name:
            setattr(operations, name, lambda *_: False)
    return NonNvmlCudaPlatform
