"""Which operations a model needs, with the facts that decide who can run them: config.json in, operations out.

A fact that the config does not give is left out, so that no rule which asks for it can match: the answer is
"unknown" then, not a guess.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from crosstie.catalog.config import Config
from crosstie.core.model import LINEAR_ROLES, Model, Tensor
from crosstie.port.preflight.rules import OF_MODEL, Value

# Families that say nothing of these in their config.
_SINKS = {"gpt_oss"}
_SINK_KEYS = (
    "attention_sink", "attention_sinks", "sinks", "add_swa_attention_sink_bias", "add_full_attention_sink_bias",
    "swa_attention_sink_enabled", "param_sink_number",
)  # fmt: skip
_ALIBI = {"bloom", "mpt", "baichuan"}
_RECURRENT = {
    "mamba": "mamba", "mamba2": "mamba2", "bamba": "mamba2", "nemotron_h": "mamba2", "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2", "zamba2": "mamba2", "jamba": "mamba", "zamba": "mamba", "rwkv": "rwkv",
    "lfm2": "short_conv", "lfm2_moe": "short_conv", "minimax": "lightning", "minimax_text_01": "lightning",
    "recurrent_gemma": "rg_lru",
}  # fmt: skip


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How one part of a checkpoint is stored: the words of `checkpoint.formats`."""

    scheme: str
    activations: str = "none"
    scales: str = "float"
    # Whose loader it is for: "fp8", "compressed-tensors", ...; "none" for plain weights.
    method: str = "none"
    # Of integers: how many share a scale (-1: a whole row), and whether rows were reordered by activation.
    group: int | None = None
    act_order: bool = False


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is to run: ranks, whether experts are spread over them, and the KV cache's type."""

    tp: int = 1
    ep: bool = False
    kv: str = "bf16"


class ModelOperation(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    facts: dict[str, Value]
    # For people: "attention of 64 heads of 128".
    words: str
    # The key of config.json that asks for it.
    key: str


def operations(
    config: Config, model: Model | None, layout: Layout, linear: Sequence[Weights], experts: Sequence[Weights],
    sinks: bool = False,
) -> list[ModelOperation]:  # fmt: skip
    """Each operation once, in the order in which a token meets them; products once for each way to store weights.

    `sinks`: the checkpoint has tensors of attention sinks, whatever its config says.
    """
    found = [*(_gemm(config, model, layout, weights) for weights in linear), *_mixers(config, model, layout, sinks)]
    # A config with experts whose weights were not recognised still needs them.
    mixtures = (_moe(config, layout, weights) for weights in (experts or linear))
    return found + [moe for moe in mixtures if moe]


def model_facts(config: Config, found: Sequence[ModelOperation]) -> dict[str, Value]:
    """What a row on any operation may ask of the whole model: whether a graph can be captured is no matter of the
    engine alone, but of what the model does inside it."""
    named = config.outer.get("architectures")
    kinds = {operation.kind: operation for operation in found}
    attention = next((one for one in ("mla", "attention") if one in kinds), "none")
    if "sparse_attention" in kinds:
        attention = str(kinds["sparse_attention"].facts["kind"])
    facts: dict[str, Value] = {
        "attention": "gqa" if attention == "attention" else attention,
        "compressed": config.get("compress_ratios") is not None,
        "indexer": "sparse_attention" in kinds,
        "recurrent": kinds["linear_attention"].facts["kind"] if "linear_attention" in kinds else "none",
        "chunked": any(operation.facts.get("chunked") is True for operation in found),
        "routing": _routing(config) if "moe" in kinds else "none",
        "hyper_connections": bool(config.get("hc_mult")),
        "expert_dtype": str(config.get("expert_dtype") or "unsaid"),
    }
    if isinstance(named, list) and named:
        facts["architecture"] = str(named[0])
    return {f"{OF_MODEL}{name}": value for name, value in facts.items()}


def _routing(config: Config) -> str:
    """How tokens find their experts: by a table of their ids in some layers, within groups, or by score alone."""
    if config.maybe("num_hash_layers", least=0):
        return "hash"
    return "grouped" if (config.maybe("n_group", least=0) or 1) > 1 else "top-k"


def compute_type(said: object) -> str:
    """What engines compute in: the type of the config or of --dtype, and BF16 for what is stored wider."""
    return "fp16" if str(said).removeprefix("torch.") in ("float16", "half") else "bf16"


def stored_facts(config: Config, weights: Weights) -> dict[str, Value]:
    """What both a loader and a product ask of weights."""
    facts: dict[str, Value] = {
        "activations": weights.activations, "method": weights.method, "act_order": weights.act_order,
        "compute": compute_type(config.get_outer("torch_dtype") or config.get_outer("dtype")),
    }  # fmt: skip
    return facts if weights.group is None else {**facts, "group": weights.group}


def _gemm(config: Config, model: Model | None, layout: Layout, linear: Weights) -> ModelOperation:
    facts: dict[str, Value] = {"weights": linear.scheme, "tp": layout.tp, **stored_facts(config, linear)}
    if model:
        sides = [side for tensor, _ in model.tensors() for side in _sides(tensor, layout)]
        facts["aligned16"] = all(length % 16 == 0 for length, _ in sides)
        # Blocks must be whole where ranks share a side; a side that all of them hold may end in a part of one.
        facts["aligned128"] = all(length % 128 == 0 for length, shared in sides if shared)
        if linear.group and linear.group > 0:
            inputs = [into for tensor, _ in model.tensors() if (into := _shared_input(tensor, layout))]
            facts["whole_groups"] = all(length % linear.group == 0 for length in inputs)
    return ModelOperation(
        kind="gemm", facts=facts, words=f"matrix products with {linear.scheme} weights", key="quantization_config"
    )


def _sides(tensor: Tensor, layout: Layout) -> list[tuple[float, bool]]:
    """The lengths of a matrix's sides on one rank, and whether ranks share that side."""
    if tensor.role not in LINEAR_ROLES or tensor.copies > 1 or not tensor.kernel:
        # Experts are an operation of their own; vectors and routers are not quantised.
        return []
    ranks = min(layout.tp, tensor.max_shards)
    out, into = (tensor.shard == side and ranks > 1 for side in ("out", "in"))
    return [(tensor.rows / (ranks if out else 1), out), (tensor.cols / (ranks if into else 1), into)]


def _shared_input(tensor: Tensor, layout: Layout) -> float | None:
    """How much of a matrix's input one rank holds, where ranks share it: groups of a scale run along it."""
    if tensor.shard != "in" or layout.tp == 1 or not _sides(tensor, layout):
        return None
    return tensor.cols / min(layout.tp, tensor.max_shards)


def _mixers(config: Config, model: Model | None, layout: Layout, sinks: bool) -> Iterator[ModelOperation]:
    family = config.word("model_type")
    if config.get("compress_ratios") is not None:
        yield _sparse(config, layout, "v4")
    elif config.get("kv_lora_rank") is not None:
        if config.get("index_topk") is not None:
            yield _sparse(config, layout, "dsa")
        else:
            yield _latent(config, layout)
    elif config.get("num_attention_heads", "n_head") is not None and family not in ("mamba", "mamba2", "rwkv"):
        yield from _grouped(config, model, layout, family, sinks)
        if isinstance(blocks := config.get("sparse_attention_config"), Mapping):
            yield _block_sparse(config, layout, blocks)
    recurrent = _recurrent(config, family)
    if recurrent:
        yield ModelOperation(
            kind="linear_attention", facts={"kind": recurrent[0]}, words=f"{recurrent[0]} layers", key=recurrent[1]
        )


def _recurrent(config: Config, family: str) -> tuple[str, str] | None:
    if config.get("linear_attn_config") is not None:
        return "kda", "linear_attn_config"
    if config.get("linear_num_value_heads") is not None:
        return "gdn", "linear_num_value_heads"
    for key, kind in (
        ("conv_L_cache", "short_conv"), ("mamba_n_heads", "mamba2"), ("mamba_num_heads", "mamba2"),
        ("mamba_d_state", "mamba"), ("attn_type_list", "lightning"),
    ):  # fmt: skip
        value = config.get(key)
        # MiniMax-M2 still lists a kind for each layer, and none of them is the recurrent one (0).
        if value is not None and not (key == "attn_type_list" and isinstance(value, list) and 0 not in value):
            return _RECURRENT.get(family, kind), key
    return (_RECURRENT[family], "model_type") if family in _RECURRENT else None


def _heads(config: Config, layout: Layout) -> dict[str, Value]:
    heads = config.maybe("num_attention_heads", "n_head")
    return {"heads": heads // layout.tp} if heads and heads % layout.tp == 0 else {}


def _known(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def _latent(config: Config, layout: Layout) -> ModelOperation:
    sizes = {name: config.maybe(name, least=0) for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")}
    facts = {**_heads(config, layout), "kv": layout.kv, **_known(sizes)}
    return ModelOperation(
        kind="mla", facts=facts, key="kv_lora_rank",
        words=f"latent attention (MLA) with {facts.get('heads', '?')} heads a rank, rank {facts.get('kv_lora_rank')}",
    )  # fmt: skip


def _sparse(config: Config, layout: Layout, kind: str) -> ModelOperation:
    keys = {"index_heads": "index_n_heads", "index_head_dim": "index_head_dim", "top_k": "index_topk"}
    sizes = {name: config.maybe(key) for name, key in keys.items()}
    facts = {**_heads(config, layout), "kind": kind, "kv": layout.kv, "tp": layout.tp, **_known(sizes)}
    key = "compress_ratios" if kind == "v4" else "index_topk"
    words = f"sparse attention ({kind}) with {facts.get('heads', '?')} heads a rank, top {facts.get('top_k', '?')}"
    return ModelOperation(kind="sparse_attention", facts=facts, words=words, key=key)


def _block_sparse(config: Config, layout: Layout, said: Mapping[str, object]) -> ModelOperation:
    """MiniMax-M3's: an index scores whole blocks of keys, beside layers that attend to all of them."""
    keys = {
        "index_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim", "top_k": "sparse_topk_blocks",
    }  # fmt: skip
    sizes = {name: value for name, key in keys.items() if isinstance(value := said.get(key), int)}
    facts = {**_heads(config, layout), "kind": "msa", "kv": layout.kv, "tp": layout.tp, **sizes}
    words = f"block-sparse attention (msa), the best {sizes.get('top_k', '?')} blocks"
    return ModelOperation(kind="sparse_attention", facts=facts, words=words, key="sparse_attention_config")


def _grouped(
    config: Config, model: Model | None, layout: Layout, family: str, sinks: bool
) -> Iterator[ModelOperation]:  # fmt: skip
    heads = config.count("num_attention_heads", "n_head")
    kv_heads = config.maybe("num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    if model is not None and config.get("multi_query") is not None:
        # Falcon-7B writes 71 key-value heads and means one.
        kv_heads = model.kv_heads
    hidden = config.maybe("hidden_size", "n_embd", "d_model")
    dim = config.maybe("head_dim") or (hidden // heads if hidden and hidden % heads == 0 else None)
    shared: dict[str, Value] = {
        **_heads(config, layout),
        "kv": layout.kv,
        "sinks": sinks or family in _SINKS or any(config.get(key) for key in _SINK_KEYS),
        "softcap": config.get("attn_logit_softcapping") is not None,
        "alibi": family in _ALIBI or config.get("alibi") is True,
        "encoder": False,
        "scale": _scale(config, family, dim),
    }
    kinds = config.get("layer_types")
    kinds = set(kinds) if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else set()
    chunked = config.get("attention_chunk_size") is not None
    windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    local = windowed and (not kinds or "sliding_attention" in kinds)
    everywhere = not kinds or "full_attention" in kinds
    variants = [
        ((False, True), chunked),
        ((True, False), local),
        ((False, False), everywhere or not (chunked or local)),
    ]
    for window, in_chunks in (kind for kind, wanted in variants if wanted):
        wide = config.maybe("global_head_dim") if not window and not in_chunks else None
        own_kv = (config.maybe("num_global_key_value_heads") if wide else None) or kv_heads
        key_dim, value_dim = wide or dim, config.maybe("v_head_dim") or wide or dim
        facts: dict[str, Value] = {**shared, "window": window, "chunked": in_chunks}
        if heads % own_kv == 0:
            facts["gqa_ratio"] = heads // own_kv
        # Fewer heads than ranks are held by several ranks each.
        if own_kv % layout.tp == 0 or layout.tp % own_kv == 0:
            facts["kv_heads"] = max(1, own_kv // layout.tp)
        if key_dim and value_dim:
            facts["head_dim"], facts["v_head_dim"] = key_dim, value_dim
        kind = " over a window" if window else " in chunks" if in_chunks else ""
        with_sinks = ", with sinks" if shared["sinks"] else ""
        words = f"attention{kind}, {heads} heads of {key_dim or '?'} on {own_kv} key-value heads{with_sinks}"
        yield ModelOperation(kind="attention", facts=facts, words=words, key="num_attention_heads")


def _scale(config: Config, family: str, dim: int | None) -> str:
    """Whether scores are divided by the root of the head size, or by a number of the model's own."""
    root, factor = config.get("query_pre_attn_scalar"), config.get("attention_multiplier")
    if family.startswith("gemma4") or (root is not None and root != dim):
        return "own"
    if factor is None:
        return "plain"
    usual = isinstance(factor, int | float) and dim is not None and abs(factor * dim**0.5 - 1) < 1e-3
    return "plain" if usual else "own"


def _moe(config: Config, layout: Layout, experts: Weights) -> ModelOperation | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    count = config.maybe(*names, least=0)
    if not count:
        return None
    inner = config.maybe("moe_intermediate_size", "expert_ffn_hidden_size") or config.maybe("intermediate_size")
    family = config.word("model_type")
    # Families spell the key apart; SiLU where a config has none of them.
    activation = config.get("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")
    facts: dict[str, Value] = {
        "weights": experts.scheme,
        "activations": experts.activations,
        "method": experts.method,
        "experts": count,
        "tp": layout.tp,
        "ep": layout.ep,
        "activation": "swigluoai" if family == "gpt_oss" else activation if isinstance(activation, str) else "silu",
        "bias": family == "gpt_oss",
        "shared_experts": config.maybe("n_shared_experts", "num_shared_experts", least=0) or 0,
    }
    active = config.maybe(
        "num_experts_per_tok", "top_k_experts", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"
    )
    facts |= _known({"experts_per_token": active, "hidden": config.maybe("hidden_size")})
    ranks = 1 if layout.ep else layout.tp
    if inner and inner % ranks == 0:
        facts["inter"] = inner // ranks
    words = f"{count} experts, {active or '?'} a token, {facts.get('inter', '?')} wide a rank, in {experts.scheme}"
    key = next(name for name in names if config.raw.get(name) is not None)
    return ModelOperation(kind="moe", facts=facts, words=words, key=key)
