"""config.json in, Model out. Families are told apart by the keys they have; quirks by model_type."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from crosstie.catalog.attention import (
    Attention,
    compressed_attention,
    grouped_attention,
    latent_attention,
    linear_attention,
    plain,
    split_in,
    split_out,
    vector,
)
from crosstie.catalog.config import Config
from crosstie.catalog.families import FOREIGN, FOREIGN_HEADS, HYBRID, STRUCTURAL, Quirks, quirks_of
from crosstie.catalog.feedforward import NO_FORWARD, FeedForward, dense, experts
from crosstie.catalog.hybrids import hybrid_layers
from crosstie.catalog.quantisation import Names, native_formats
from crosstie.core.model import Layer, Model, Tensor


def read_model(raw: Mapping[str, Any], file: Path | str, *, prefix: str = "", **about: Any) -> tuple[Model, Config]:
    """The model that a config describes, and the config with what was read of it.

    `about`: what a config does not say of a `Model`: id, name, source and date; aliases, licence and notes.
    """
    config = Config(raw, file, prefix)
    family = _family(config)
    quirks = quirks_of(family)
    hidden = config.count("hidden_size", "n_embd", "d_model", "n_embed")
    depth = _depth(config, family)
    if depth > 10_000:
        raise config.bad("num_hidden_layers", f"{depth:,} layers are a slip")
    heads = _heads(config, family, hidden)
    vocabulary = config.count("vocab_size")
    parts = _parts(config, family, quirks, hidden, heads, depth)
    layers = _group(parts, _per_layer(config, quirks, hidden))
    limit = config.maybe("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    outer = _outer_tensors(config, quirks, hidden, vocabulary, limit, depth)
    routed = [t for layer in layers for t in layer.tensors if t.role == "experts"]
    native, native_name = native_formats(config, _names(parts))
    drafts = _draft(config, hidden, layers)
    _refuse_what_nobody_read(config)
    architectures = config.outer.get("architectures")
    model = Model(
        architecture=architectures[0] if isinstance(architectures, list) and architectures else family or "unnamed",
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=max((s.kv_heads for layer in layers for s in layer.scans if s.name != "index"), default=heads),
        max_context=limit,
        layers=layers,
        outer=outer,
        draft_tensors=drafts,
        experts=max((t.copies for t in routed), default=0),
        experts_per_token=max((t.active for t in routed), default=0),
        native=native,
        native_name=native_name,
        file=str(file),
        **about,
    )
    return model, config


def _depth(config: Config, family: str) -> int:
    listed = None
    if family in HYBRID:
        # Nemotron-H's pattern has a letter a layer, and newer configs of it have no number beside it.
        pattern, kinds = config.word("hybrid_override_pattern"), config.get("layers_block_type")
        listed = len(pattern) or (len(kinds) if isinstance(kinds, list) else 0) or None
        # Factors and kernels of the state change nothing that is counted.
        config.asked.update(key for key in config.raw if key.startswith(("mamba_", "ssm_")))
    return config.count("num_hidden_layers", "n_layer", "n_layers", default=listed)


def _heads(config: Config, family: str, hidden: int) -> int:
    """What ranks share out: heads of attention, or of the state where there is no attention."""
    alone = {"mamba": hidden * 2, "falcon_mamba": hidden * 2}.get(family)
    names = ("num_heads",) if family == "mamba2" else ("num_attention_heads", "n_head")
    return config.count(*names, default=alone)


def _parts(
    config: Config, family: str, quirks: Quirks, hidden: int, heads: int, depth: int
) -> list[tuple[Attention, FeedForward]]:
    if family not in HYBRID:
        attention_of = _attention_reader(config, quirks, hidden, heads, depth)
        forward_of = _forward_reader(config, quirks, hidden, depth)
        shared = config.maybe("num_kv_shared_layers", least=0) or 0
        wide = shared and config.flag("use_double_wide_mlp")
        parts = [(attention_of(i), forward_of(i)) for i in range(depth)]
        # Gemma 3n and 4: the last layers read what earlier ones keep.
        last = dense(hidden, 2 * _inner(config, quirks, hidden), gated=quirks.gated_mlp) if wide else None
        return [
            (attention, forward) if i < depth - shared else (_on_shared_cache(attention), last or forward)
            for i, (attention, forward) in enumerate(parts)
        ]

    def attention() -> Attention:
        kv_heads = config.count("num_key_value_heads", default=heads)
        return _full_attention(config, quirks, hidden, heads, kv_heads, _head_dim(config, hidden, heads))[0]

    has_forward = family not in ("nemotron_h", "mamba", "mamba2", "falcon_mamba")
    forward_of = _forward_reader(config, quirks, hidden, depth) if has_forward else lambda _: NO_FORWARD
    made = hybrid_layers(config, family, hidden, depth, attention, forward_of)
    if len(made) != depth:
        raise config.bad("num_hidden_layers", f"{depth}, and the pattern of layers has {len(made)}")
    return made


def _on_shared_cache(attention: Attention) -> Attention:
    """Without keys and values of its own; of the norms of queries and keys the first is left."""
    own = (structs.replace(t, rows=t.rows // 2) if t.name == "qk_norm" else t for t in attention.tensors)
    scans = tuple(structs.replace(scan, kept=False) for scan in attention.scans)
    return replace(attention, tensors=tuple(t for t in own if t.role not in ("key", "value")), scans=scans)


def _outer_tensors(
    config: Config, quirks: Quirks, hidden: int, vocabulary: int, limit: int | None, depth: int
) -> tuple[Tensor, ...]:
    """Embedding, what follows the last layer, and the head where it is not the embedding again."""
    tied = config.flag_outer("tie_word_embeddings")
    if tied is None:
        tied = quirks.tied
    # A tied embedding is stored once and multiplied by as the head.
    embedding = Tensor(
        name="embedding", role="embedding", rows=vocabulary, cols=hidden, shard="vocab", kernel="head" if tied else ""
    )
    final = [vector("final_norm", hidden * quirks.final_norms + _stream_mixer(config, hidden))]
    if quirks.positions_beyond is not None and limit:
        final.append(vector("positions", (limit + quirks.positions_beyond) * hidden))
    head = [] if tied else [split_out("head", vocabulary, hidden, "head", "head")]
    return (embedding, *final, *_token_tensors(config, hidden, depth), *head)


def _token_tensors(config: Config, hidden: int, depth: int) -> list[Tensor]:
    """Gemma 3n and 4: what each layer is told of the token, and how the streams of 3n begin and end."""
    made: list[Tensor] = []
    if own := config.maybe("hidden_size_per_layer_input", least=0):
        rows = config.count("vocab_size_per_layer_input")
        made += [
            Tensor(name="token_embedding", role="embedding", rows=rows, cols=depth * own, shard="vocab"),
            plain("token_inputs", depth * own, hidden, "token_inputs", "auxiliary"),
            vector("token_inputs_norm", own),
        ]
    beside = 2 * (config.count("altup_num_inputs", default=1) - 1)
    return made + [plain(f"altup_{i}", hidden, hidden, f"altup_{i}", "auxiliary") for i in range(beside)]


def _names(parts: list[tuple[Attention, FeedForward]]) -> list[Names]:
    """What quantisation settings may name; Kimi's linear attention goes by the usual names."""
    return [
        Names(frozenset(t.role for t in attention.tensors + forward.tensors), attention.kind == "gated delta")
        for attention, forward in parts
    ]


def _family(config: Config) -> str:
    """The language model's type; multimodal configs have one at the top and one inside."""
    config.asked_outer.update(("model_type", "architectures"))
    config.asked.add("architectures")
    family = config.word("model_type")
    outside = config.outer.get("model_type")
    family = family or (outside if isinstance(outside, str) else "")
    if family in FOREIGN:
        raise config.bad("model_type", f"'{family}' is no decoder of the kinds that Crosstie reads")
    heads = config.outer.get("architectures")
    for head in heads if isinstance(heads, list) else ():
        if str(head).endswith(FOREIGN_HEADS):
            raise config.bad("architectures", f"'{head}' does not generate text")
    if config.flag("is_encoder_decoder"):
        raise config.bad("is_encoder_decoder", "Crosstie reads decoders alone")
    return family


def _refuse_what_nobody_read(config: Config) -> None:
    for key, value in config.raw.items():
        # MiniMax-M2 lists a kind for each layer, and all of them are the usual one.
        usual = key == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value)
        if key not in config.asked and value not in (None, False) and key.startswith(STRUCTURAL) and not usual:
            raise config.bad(key, "changes what a layer is, and no reader of Crosstie understands it")


def _group(
    parts: list[tuple[Attention, FeedForward]], per_layer: tuple[tuple[Tensor, ...], float]
) -> tuple[Layer, ...]:
    """Equal layers become one entry with a count; order does not matter to what a step costs."""
    extra, streams = per_layer
    alike: dict[tuple[Attention, FeedForward], list[int]] = {}
    for index, pair in enumerate(parts):
        alike.setdefault(pair, []).append(index)
    return tuple(
        Layer(
            kind=f"{attention.kind} + {forward.kind}",
            count=len(at),
            at=tuple(at),
            tensors=attention.tensors + forward.tensors + extra,
            scans=attention.scans,
            state=attention.state,
            # Two norms, each reading and writing the hidden state and the residual; 16 bits.
            elementwise_bytes=2.0 * streams + 2.0 * forward.gathered_elements,
            elementwise_sharded_bytes=2.0 * (attention.moved_elements + forward.moved_elements),
            routing_kernels=forward.routing_kernels,
        )
        for (attention, forward), at in alike.items()
    )


def _per_layer(config: Config, quirks: Quirks, hidden: int) -> tuple[tuple[Tensor, ...], float]:
    """Tensors that a layer has beside attention and feed-forward, and elements its norms move."""
    norms = quirks.norms
    if quirks.multi_query is False and config.flag("parallel_attn") and not config.flag("new_decoder_architecture"):
        # Falcon-7B: one norm, with its offset, before both.
        norms = 2
    streams = config.maybe("hc_mult") or 1
    tensors = [vector("norms", norms * hidden)]
    if streams > 1:
        mixers = (2 + streams) * streams
        tensors.append(vector("hyper_connections", 2 * (mixers * streams * hidden + mixers + 3)))
    if config.maybe("attn_res_block_size"):
        tensors.append(vector("attention_residual", 4 * hidden))
    if own := config.maybe("hidden_size_per_layer_input", least=0):
        # Gemma 3n and 4: an embedding of the token for each layer.
        tensors += [plain("token_gate", own, hidden, "token_gate", "auxiliary"), vector("token_norm", hidden)]
        tensors.append(plain("token_projection", hidden, own, "token_projection", "auxiliary"))
    if rank := config.maybe("laurel_rank"):
        tensors += [plain("laurel_a", rank, hidden, "laurel_a", "auxiliary"), vector("laurel_norm", hidden)]
        tensors.append(plain("laurel_b", hidden, rank, "laurel_b", "auxiliary"))
    if predicted := config.maybe("altup_num_inputs"):
        streams = predicted
        tensors.append(vector("altup", (2 + predicted) * hidden + predicted**2 + predicted**3))
    return tuple(tensors), 4.0 * hidden * max(2, norms // 2 + streams)


def _stream_mixer(config: Config, hidden: int) -> int:
    streams = config.maybe("hc_mult") or 0
    mixer = streams * streams * hidden + streams + 1 if streams else 0
    return mixer + (2 * hidden if config.maybe("attn_res_block_size") else 0)


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if config.get("head_dim", "attention_head_dim") is None and hidden % heads:
        raise config.bad("head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads")
    return config.count("head_dim", "attention_head_dim", default=hidden // heads)


def _attention_reader(
    config: Config, quirks: Quirks, hidden: int, heads: int, depth: int
) -> Callable[[int], Attention]:
    if config.get("compress_ratios") is not None:
        ratios = config.counts("compress_ratios", depth) or []
        for ratio in ratios:
            if ratio not in (0, 4, 128):
                raise config.bad("compress_ratios", f"{ratio} is not one of 0, 4, 128")
        config.count("num_key_value_heads", default=1)
        return lambda i: compressed_attention(config, hidden=hidden, heads=heads, ratio=ratios[i])
    if config.get("kv_lora_rank") is not None:
        latent = latent_attention(config, hidden=hidden, heads=heads, output_gate=quirks.gated_output)
        hybrid = config.nested_config("linear_attn_config")
        indexers = config.words("indexer_types", depth)
        if indexers:
            # GLM-5.2: layers that take over what an earlier layer's indexer chose keep no index of their own.
            for index, mode in enumerate(indexers):
                if mode not in ("full", "shared"):
                    raise config.bad(f"indexer_types[{index}]", f"'{mode}' is not one of full, shared")
            shared = latent_attention(
                config, hidden=hidden, heads=heads, output_gate=quirks.gated_output, indexer=False
            )
            return lambda i: latent if indexers[i] == "full" else shared
        group = config.maybe("layer_group_size")
        if group:
            # Ring-2.5: the last layer of every group sees everything, as do those after the last whole group.
            linear, whole = _lightning(config, hidden), depth // group * group
            return lambda i: latent if (i + 1) % group == 0 or i >= whole else linear
        if hybrid is None:
            return lambda i: latent
        delta = _kimi_delta(hybrid, hidden)
        full = set(hybrid.counts("full_attn_layers") or ())
        return lambda i: latent if i + 1 in full else delta
    return _grouped_reader(config, quirks, hidden, heads, depth)


def _grouped_reader(config: Config, quirks: Quirks, hidden: int, heads: int, depth: int) -> Callable[[int], Attention]:
    kv_heads = config.count("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if quirks.multi_query is not None and not config.flag("new_decoder_architecture"):
        kv_heads = 1 if config.flag("multi_query", quirks.multi_query) else kv_heads
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    head_dim = _head_dim(config, hidden, heads)
    # Laguna: layers with a window have more heads than those that see everything.
    own = config.counts("num_attention_heads_per_layer", depth) or [heads] * depth
    readers = {}
    for count in dict.fromkeys(own):
        full, common = _full_attention(config, quirks, hidden, count, kv_heads, head_dim)
        readers[count] = _by_layer(config, quirks, depth, full, common, kv_heads, head_dim)
    return lambda i: readers[own[i]](i)


def _full_attention(
    config: Config, quirks: Quirks, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Attention, dict[str, Any]]:
    """Attention over everything, and what attention over less has in common with it."""
    everywhere = _linear_bias(config, quirks)
    bias = config.flag("attention_bias") or config.flag("qkv_bias") or quirks.qkv_bias or everywhere
    norm = "head" if quirks.head_norm else "full" if quirks.full_norm else "none"
    if config.word("qk_norm_type") == "per_layer":
        norm = "full"
    elif quirks.may_have_head_norm and config.flag("use_qk_norm"):
        norm = "head"
    elif quirks.may_have_full_norm and config.flag("use_qk_norm"):
        norm = "full"
    common: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "qk_norm": norm,
        "bias": bias,
        "output_bias": quirks.output_bias or everywhere,
        "sinks": quirks.sinks,
        "output_gate": config.flag("attn_output_gate", quirks.gated_output),
    }
    gating = config.get("gating") if quirks.gating else None
    if gating not in (None, False, True, "per-head", "per-element"):
        raise config.bad("gating", f"{gating!r:.60} is not one of true, false, per-head, per-element")
    common["output_gate"] |= gating == "per-element"
    common["head_gate"] = gating in (True, "per-head")
    full = grouped_attention(
        kv_heads=config.count("num_global_key_value_heads", default=kv_heads),
        head_dim=config.count("global_head_dim", default=head_dim),
        key_is_value=config.flag("attention_k_eq_v"), **common,
    )  # fmt: skip
    return full, common


def _linear_bias(config: Config, quirks: Quirks) -> bool:
    if quirks.linear_bias is None:
        return False
    named = "use_bias" if config.get("use_bias") is not None else "bias"
    return config.flag(named, quirks.linear_bias)


def _by_layer(
    config: Config, quirks: Quirks, depth: int, full: Attention, common: dict[str, Any], kv_heads: int, head_dim: int
) -> Callable[[int], Attention]:
    hidden: int = common["hidden"]
    sparse = config.nested_config("sparse_attention_config")
    if sparse is not None:
        # MiniMax-M3: an index chooses blocks of the cache for each key-value head.
        marks = sparse.counts("sparse_attention_freq", depth) or [1] * depth
        blocks = grouped_attention(
            kv_heads=kv_heads, head_dim=head_dim,
            top_rows=sparse.count("sparse_topk_blocks") * sparse.count("sparse_block_size"),
            index=(sparse.count("sparse_num_index_heads"), sparse.count("sparse_index_dim")), **common,
        )  # fmt: skip
        return lambda i: blocks if marks[i] else full
    kinds = _layer_types(config, quirks, depth)
    local = full
    chunk, window = config.maybe("attention_chunk_size"), config.maybe("sliding_window", least=0)
    if chunk:
        local = grouped_attention(
            kv_heads=kv_heads, head_dim=head_dim, window=chunk, window_read_fraction=0.5, **common
        )
    elif window and _uses_window(config):
        local = grouped_attention(kv_heads=kv_heads, head_dim=head_dim, window=window, **common)
    by_kind = {"full_attention": full, "sliding_attention": local, "chunked_attention": local}
    if "linear_attention" in kinds:
        by_kind["linear_attention"] = _gated_delta(config, hidden)
    for index, kind in enumerate(kinds):
        if kind not in by_kind:
            raise config.bad(f"layer_types[{index}]", f"'{kind}' is not one of {', '.join(by_kind)}")
        if kind in ("sliding_attention", "chunked_attention") and local is full:
            raise config.bad("sliding_window", f"missing: layer_types[{index}] is '{kind}'")
    return lambda i: by_kind[kinds[i]]


def _layer_types(config: Config, quirks: Quirks, depth: int) -> list[str]:
    given = config.words("layer_types", depth)
    if given:
        return given
    if config.maybe("attention_chunk_size"):
        # Llama-4: every fourth layer sees everything and carries no rotary embedding.
        return ["full_attention" if (i + 1) % 4 == 0 else "chunked_attention" for i in range(depth)]
    every = config.maybe("full_attention_interval")
    if every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(depth)]
    if not (config.maybe("sliding_window", least=0) and _uses_window(config)):
        config.get("sliding_window_pattern", "_sliding_window_pattern", "max_window_layers")
        return ["full_attention"] * depth
    pattern = config.maybe("sliding_window_pattern", "_sliding_window_pattern") or quirks.full_attention_every
    if pattern:
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(depth)]
    # Qwen2: the first layers see everything.
    first = config.count("max_window_layers", default=0, least=0)
    return ["full_attention" if i < first else "sliding_attention" for i in range(depth)]


def _uses_window(config: Config) -> bool:
    return config.flag("use_sliding_window", default=True)


def _gated_delta(config: Config, hidden: int) -> Attention:
    key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    conv = config.count("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    wide = config.word("mamba_ssm_dtype") in ("", "float32")
    projections = (
        split_out("qkv", channels, hidden, "qkvz"),
        split_out("z", values, hidden, "qkvz"),
        split_out("beta_alpha", 2 * value_heads, hidden, "ba", "auxiliary"),
        Tensor(name="conv", role="small", rows=channels, cols=conv),
        vector("decay", 2 * value_heads + value_dim),
        split_in("o", hidden, values, "o", "output"),
    )
    return linear_attention(
        kind="gated delta", value_heads=value_heads,
        key_dim=key_dim, value_dim=value_dim, conv=conv, projections=projections,
        conv_channels=channels, state_element_bytes=4.0 if wide else 2.0,
    )  # fmt: skip


def _kimi_delta(hybrid: Config, hidden: int) -> Attention:
    heads, dim = hybrid.count("num_heads"), hybrid.count("head_dim")
    conv = hybrid.count("short_conv_kernel_size")
    width = heads * dim
    projections = (
        *(split_out(part, width, hidden, "qkvg") for part in ("q", "k", "v", "g")),
        plain("f_a", dim, hidden, "f_a", "auxiliary"),
        split_out("f_b", width, dim, "f_b", "auxiliary"),
        plain("beta", heads, hidden, "f_a", "auxiliary"),
        Tensor(name="conv", role="small", rows=3 * width, cols=conv),
        vector("decay", width + heads + dim),
        split_in("o", hidden, width, "o", "output"),
    )
    return linear_attention(
        kind="kimi delta", value_heads=heads, key_dim=dim, value_dim=dim,
        conv=conv, projections=projections, conv_channels=3 * width,
    )  # fmt: skip


def _lightning(config: Config, hidden: int) -> Attention:
    """Linear attention with a fixed decay: a gate and a norm, and no convolution."""
    heads = config.count("num_kv_heads_for_linear_attn", "num_attention_heads")
    dim = hidden // heads
    projections = (
        split_out("qkv", 3 * hidden, hidden, "qkvg"),
        split_out("g", hidden, hidden, "qkvg"),
        vector("norms", hidden + 2 * dim),
        split_in("o", hidden, hidden, "o", "output"),
    )
    return linear_attention(
        kind="lightning", value_heads=heads, key_dim=dim, value_dim=dim, conv=1, projections=projections,
        conv_channels=3 * hidden,
    )  # fmt: skip


def _forward_reader(config: Config, quirks: Quirks, hidden: int, depth: int) -> Callable[[int], FeedForward]:
    count = config.maybe("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", least=0)
    if count == 1 and config.get("expert_layer_period") is not None:
        # Jamba's way to say that nothing is routed.
        count = 0
    if not count:
        inner = _inner(config, quirks, hidden)
        bias = config.flag("mlp_bias") or _linear_bias(config, quirks)
        plain_mlp = dense(hidden, inner, gated=quirks.gated_mlp, bias=bias)
        return lambda i: plain_mlp
    routed, is_dense = _experts_reader(config, quirks, hidden, count, depth)
    # DeepSeek-V4: the first layers look their experts up by the token, and correct no scores.
    by_token = config.count("num_hash_layers", default=0, least=0)
    unbiased = replace(routed, tensors=tuple(t for t in routed.tensors if t.name != "router_bias"))
    beside = dense(hidden, config.count("intermediate_size")) if config.flag("enable_moe_block") else None
    dense_inner = config.maybe(quirks.dense_inner_key)
    dense_layer = dense(hidden, dense_inner) if dense_inner else None

    def forward(index: int) -> FeedForward:
        if is_dense(index):
            if dense_layer is None:
                raise config.bad("intermediate_size", f"missing: layer {index} is dense")
            return dense_layer
        if index < by_token:
            return unbiased
        if beside is None:
            return routed
        return FeedForward(
            f"dense beside {routed.kind}", beside.tensors + routed.tensors,
            beside.moved_elements + routed.moved_elements, routed.routing_kernels, routed.gathered_elements,
        )  # fmt: skip

    return forward


def _inner(config: Config, quirks: Quirks, hidden: int) -> int:
    """How wide a dense feed-forward is."""
    default = None if quirks.gated_mlp else config.maybe("expansion_ratio") or 4
    usual = ("intermediate_size", "block_ff_dim", "n_inner", "ffn_dim", "ffn_hidden_size")
    inner = config.count(
        *(("shared_intermediate_size",) if quirks.shared_alone else usual), default=default and default * hidden
    )
    if quirks.inner_rounded and config.flag("block_auto_adjust_ff_dim", default=True):
        factor, multiple = config.get("block_ffn_dim_multiplier"), config.count("block_multiple_of", default=256)
        inner = int(2 * inner / 3)
        inner = int(factor * inner) if isinstance(factor, int | float) else inner
        inner = multiple * -(-inner // multiple)
    return inner


def _experts_reader(
    config: Config, quirks: Quirks, hidden: int, count: int, depth: int
) -> tuple[FeedForward, Callable[[int], bool]]:
    inner = config.maybe("moe_intermediate_size") or config.count("intermediate_size")
    active = config.count(
        "num_experts_per_tok", "top_k_experts", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk"
    )
    if active > count:
        raise config.bad("num_experts_per_tok", f"{active} exceeds the {count} experts")
    shared_inner = config.maybe("shared_expert_intermediate_size", "shared_intermediate_size", least=0)
    if shared_inner is None:
        wide = config.maybe("moe_shared_expert_intermediate_size") or inner
        shared = config.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, least=0)
        shared_inner = shared * wide
    if quirks.shared_expert:
        shared_inner = inner
    # How tokens find experts costs no memory worth counting; rules of preflight ask for it, so files keep it.
    config.maybe("n_group", least=0)
    sigmoid_bias = config.word("topk_method") == "noaux_tc" or config.flag("use_routing_bias")
    routed = experts(
        hidden,
        inner,
        count=count,
        active=active,
        shared_inner=shared_inner,
        shared_gate=quirks.shared_gate and bool(shared_inner),
        router_bias=sigmoid_bias or quirks.router_bias,
        expert_bias=quirks.expert_bias,
        latent=config.maybe("routed_expert_hidden_size"),
        router_extra=hidden + count if quirks.router_scale else 0,
    )
    first_dense = config.count("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0, least=0)
    only_mlp = set(config.counts("mlp_only_layers") or ())
    last = config.maybe("moe_layer_end_index", least=-1)
    if last not in (None, -1, depth - 1):
        raise config.bad("moe_layer_end_index", f"{last}: dense layers after the experts are not read")
    kinds = config.words("mlp_layer_types", depth)
    if kinds:
        return routed, lambda i: kinds[i] == "dense"
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        marks = config.counts("moe_layer_freq", depth) or []
        return routed, lambda i: not marks[i]
    period = config.maybe("expert_layer_period")
    if period:
        # Jamba.
        offset = config.count("expert_layer_offset", default=0, least=0)
        return routed, lambda i: i % period != offset
    step = config.count(
        "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", default=1
    )
    return routed, lambda i: i < first_dense or i in only_mlp or (i + 1) % step != 0


def _draft(config: Config, hidden: int, layers: tuple[Layer, ...]) -> tuple[Tensor, ...]:
    """The multi-token-prediction module, as one more layer of the last kind and its entrance."""
    count = config.count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, least=0)
    if not count:
        return ()
    if count > 100:
        raise config.bad("num_nextn_predict_layers", f"{count:,} draft layers are a slip")
    last = layers[-1]
    return (plain("draft_entrance", hidden, 2 * hidden, "draft"), *last.tensors) * count
