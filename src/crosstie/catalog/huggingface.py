"""config.json in, Model out. Families are told apart by the keys they have; quirks by model_type."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from crosstie.catalog.feedforward import FeedForward, dense, experts
from crosstie.catalog.quantisation import native_formats
from crosstie.core.errors import BadData
from crosstie.core.model import Layer, Model, Tensor

# Families whose MLP has no gate projection.
_UNGATED = {"falcon", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "gpt_bigcode", "starcoder2", "phi", "nemotron"}
_HEAD_NORM = {
    "qwen3",
    "qwen3_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "gemma3",
    "gemma3_text",
    "gemma4_text",
}


def load_config(path: Path) -> tuple[dict[str, Any], Path]:
    """A config.json, or the directory of a model that has one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(file, "", "no such file: give a model directory or its config.json") from None
    except UnicodeDecodeError:
        raise BadData(file, "", "not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadData(file, f"line {error.lineno}", f"not valid JSON: {error.msg}") from None
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise BadData(file, "", "must hold one JSON object")
    return raw, file


def read_model(
    raw: Mapping[str, Any],
    file: Path | str,
    *,
    id: str,
    name: str,
    source: str,
    date: str,
    aliases: tuple[str, ...] = (),
    licence: str = "",
    notes: tuple[str, ...] = (),
    prefix: str = "",
) -> tuple[Model, Config]:
    """The model that a config describes, and the config with what was read of it."""
    config = Config(raw, file, prefix)
    family = config.get_outer("model_type") if not config.nested else config.get("model_type")
    if config.nested:
        config.asked_outer.add("model_type")
    family = family or config.outer.get("model_type") or ""
    architectures = config.outer.get("architectures")
    config.asked_outer.add("architectures")
    config.asked.add("architectures")
    hidden = config.count("hidden_size", "n_embd", "d_model")
    depth = config.count("num_hidden_layers", "n_layer", "n_layers")
    heads = config.count("num_attention_heads", "n_head")
    vocabulary = config.count("vocab_size")
    attention_of = _attention_reader(config, family, hidden, heads, depth)
    forward_of = _forward_reader(config, family, hidden, depth)
    layers = _group([(attention_of(i), forward_of(i)) for i in range(depth)], _per_layer(config, family, hidden))
    tied = config.get_outer("tie_word_embeddings")
    if tied is None:
        tied = family in {"gemma3", "gemma3_text", "gemma4_text"}
    outer = [
        Tensor(name="embedding", role="embedding", rows=vocabulary, cols=hidden, shard="vocab"),
        vector("final_norm", hidden * (2 if family == "falcon" else 1) + _stream_mixer(config, hidden)),
    ]
    if not tied:
        outer.append(split_out("head", vocabulary, hidden, "head", "head"))
    else:
        # Stored once as the embedding, multiplied by as the head.
        outer[0] = Tensor(
            name="embedding", role="embedding", rows=vocabulary, cols=hidden, shard="vocab", kernel="head"
        )
    expert_count = max((t.copies for layer in layers for t in layer.tensors if t.role == "experts"), default=0)
    active = max((t.active for layer in layers for t in layer.tensors if t.role == "experts"), default=0)
    native, native_name = native_formats(config)
    kv_heads = max((s.kv_heads for layer in layers for s in layer.scans if s.name != "index"), default=heads)
    model = Model(
        id=id,
        name=name,
        aliases=aliases,
        architecture=architectures[0] if isinstance(architectures, list) and architectures else family or "unnamed",
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        max_context=config.get("max_position_embeddings", "n_positions", "max_seq_len"),
        layers=layers,
        outer=tuple(outer),
        draft_tensors=_draft(config, hidden, layers),
        experts=expert_count,
        experts_per_token=active,
        native=native,
        native_name=native_name,
        source=source,
        date=date,
        licence=licence,
        notes=notes,
    )
    return model, config


def _group(
    parts: list[tuple[Attention, FeedForward]], per_layer: tuple[tuple[Tensor, ...], float]
) -> tuple[Layer, ...]:
    """Equal layers become one entry with a count; order does not matter to what a step costs."""
    extra, streams = per_layer
    counted: dict[tuple[Attention, FeedForward], int] = {}
    for part in parts:
        counted[part] = counted.get(part, 0) + 1
    layers = []
    for (attention, forward), count in counted.items():
        layers.append(
            Layer(
                kind=f"{attention.kind}; {forward.kind}",
                count=count,
                tensors=attention.tensors + forward.tensors + extra,
                scans=attention.scans,
                state=attention.state,
                # Two norms, each reading and writing the hidden state and the residual; 16 bits.
                elementwise_bytes=2.0 * streams + 2.0 * forward.gathered_elements,
                elementwise_sharded_bytes=2.0 * (attention.moved_elements + forward.moved_elements),
                routing_kernels=forward.routing_kernels,
            )
        )
    return tuple(layers)


def _per_layer(config: Config, family: str, hidden: int) -> tuple[tuple[Tensor, ...], float]:
    """Tensors that a layer has beside attention and feed-forward, and elements its norms move."""
    norms = {"gemma3": 4, "gemma3_text": 4, "gemma4_text": 7, "falcon": 4}.get(family, 2)
    streams = config.get("hc_mult") or 1
    tensors = [vector("norms", norms * hidden)]
    if streams > 1:
        mixers = (2 + streams) * streams
        tensors.append(vector("hyper_connections", 2 * (mixers * streams * hidden + mixers + 3)))
    if config.get("attn_res_block_size"):
        tensors.append(vector("attention_residual", 4 * hidden))
    return tuple(tensors), 4.0 * hidden * max(2, norms // 2 + streams)


def _stream_mixer(config: Config, hidden: int) -> int:
    streams = config.get("hc_mult") or 0
    mixer = streams * streams * hidden + streams + 1 if streams else 0
    return mixer + (2 * hidden if config.get("attn_res_block_size") else 0)


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    dim = config.get("head_dim")
    if dim is None:
        if hidden % heads:
            raise BadData(config.file, "head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads")
        return hidden // heads
    return config.count("head_dim")


def _attention_reader(config: Config, family: str, hidden: int, heads: int, depth: int) -> Callable[[int], Attention]:
    if config.get("compress_ratios") is not None:
        ratios = config.counts("compress_ratios", depth) or []
        config.count("num_key_value_heads", default=1)
        return lambda i: compressed_attention(config, hidden=hidden, heads=heads, ratio=ratios[i])
    if config.get("kv_lora_rank") is not None:
        latent = latent_attention(config, hidden=hidden, heads=heads, output_gate=family == "kimi_linear")
        hybrid = config.get("linear_attn_config")
        if not isinstance(hybrid, Mapping):
            return lambda i: latent
        delta = _kimi_delta(config, hybrid, hidden)
        full = set(hybrid.get("full_attn_layers") or ())
        return lambda i: latent if i + 1 in full else delta
    return _grouped_reader(config, family, hidden, heads, depth)


def _grouped_reader(config: Config, family: str, hidden: int, heads: int, depth: int) -> Callable[[int], Attention]:
    kv_heads = config.count("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if family == "falcon" and config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        kv_heads = 1
    head_dim = _head_dim(config, hidden, heads)
    bias = config.flag("attention_bias") or config.flag("qkv_bias") or family in {"qwen2", "qwen2_moe"}
    norm = "head" if family in _HEAD_NORM else "none"
    if config.get("qk_norm_type") == "per_layer":
        norm = "full"
    common: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "qk_norm": norm,
        "bias": bias,
        "output_bias": family == "gpt_oss",
        "sinks": family == "gpt_oss",
        "output_gate": config.flag("attn_output_gate"),
    }
    full = grouped_attention(
        kv_heads=config.count("num_global_key_value_heads", default=kv_heads),
        head_dim=config.count("global_head_dim", default=head_dim),
        key_is_value=config.flag("attention_k_eq_v"), **common,
    )  # fmt: skip
    kinds = _layer_types(config, family, depth)
    local = full
    chunk, window = config.get("attention_chunk_size"), config.get("sliding_window")
    if chunk:
        local = grouped_attention(
            kv_heads=kv_heads, head_dim=head_dim, window=chunk, window_read_fraction=0.5, **common
        )
    elif window and config.get("use_sliding_window") is not False:
        local = grouped_attention(kv_heads=kv_heads, head_dim=head_dim, window=window, **common)
    by_kind = {"full_attention": full, "sliding_attention": local, "chunked_attention": local}
    if "linear_attention" in kinds:
        by_kind["linear_attention"] = _gated_delta(config, hidden)
    for index, kind in enumerate(kinds):
        if kind not in by_kind:
            raise BadData(config.file, f"layer_types[{index}]", f"'{kind}' is not one of {', '.join(by_kind)}")
    return lambda i: by_kind[kinds[i]]


def _layer_types(config: Config, family: str, depth: int) -> list[str]:
    given = config.words("layer_types", depth)
    if given:
        return given
    if config.get("attention_chunk_size"):
        # Llama-4: every fourth layer sees everything and carries no rotary embedding.
        return ["full_attention" if (i + 1) % 4 == 0 else "chunked_attention" for i in range(depth)]
    every = config.get("full_attention_interval")
    if every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(depth)]
    pattern = config.get("sliding_window_pattern", "_sliding_window_pattern")
    if pattern is None and family in {"gemma3", "gemma3_text"}:
        pattern = 6
    if pattern:
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(depth)]
    windowed = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return ["sliding_attention" if windowed else "full_attention"] * depth


def _gated_delta(config: Config, hidden: int) -> Attention:
    key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    conv = config.count("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    wide = config.get("mamba_ssm_dtype") in (None, "float32")
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


def _kimi_delta(config: Config, hybrid: Mapping[str, Any], hidden: int) -> Attention:
    nested = Config(hybrid, config.file, "linear_attn_config.")
    heads, dim = nested.count("num_heads"), nested.count("head_dim")
    conv = nested.count("short_conv_kernel_size")
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


def _forward_reader(config: Config, family: str, hidden: int, depth: int) -> Callable[[int], FeedForward]:
    count = config.get("n_routed_experts", "num_local_experts", "num_experts")
    if not count:
        inner = config.count(
            "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden if family in _UNGATED else None
        )
        plain_mlp = dense(hidden, inner, gated=family not in _UNGATED, bias=config.flag("mlp_bias"))
        return lambda i: plain_mlp
    routed, is_dense = _experts_reader(config, family, hidden, count, depth)
    beside = None
    if config.flag("enable_moe_block"):
        beside = dense(hidden, config.count("intermediate_size"))
    dense_inner = config.get("intermediate_size_mlp") if family == "llama4_text" else config.get("intermediate_size")
    dense_layer = dense(hidden, dense_inner) if dense_inner else None

    def forward(index: int) -> FeedForward:
        if is_dense(index):
            if dense_layer is None:
                raise BadData(config.file, "intermediate_size", f"missing: layer {index} is dense")
            return dense_layer
        if beside is None:
            return routed
        return FeedForward(
            f"dense beside {routed.kind}", beside.tensors + routed.tensors,
            beside.moved_elements + routed.moved_elements, routed.routing_kernels, routed.gathered_elements,
        )  # fmt: skip

    return forward


def _experts_reader(
    config: Config, family: str, hidden: int, count: int, depth: int
) -> tuple[FeedForward, Callable[[int], bool]]:
    inner = config.get("moe_intermediate_size") or config.count("intermediate_size")
    active = config.count("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "experts_per_token")
    if active > count:
        raise BadData(config.file, "num_experts_per_tok", f"{active} exceeds the {count} experts")
    shared_inner = config.get("shared_expert_intermediate_size", "shared_intermediate_size")
    if shared_inner is None:
        shared_inner = (config.get("n_shared_experts", "num_shared_experts") or 0) * inner
    if family == "llama4_text":
        shared_inner = inner
    sigmoid_bias = config.get("topk_method") == "noaux_tc" or config.flag("use_routing_bias")
    routed = experts(
        hidden,
        inner,
        count=count,
        active=active,
        shared_inner=shared_inner,
        shared_gate=family.startswith("qwen") and bool(shared_inner),
        router_bias=sigmoid_bias or family == "gpt_oss",
        expert_bias=family == "gpt_oss",
        latent=config.get("routed_expert_hidden_size"),
        router_extra=hidden + count if family == "gemma4_text" else 0,
    )
    first_dense = config.get("first_k_dense_replace") or 0
    step = (
        config.get("interleave_moe_layer_step")
        or config.get("decoder_sparse_step")
        or config.get("moe_layer_freq")
        or 1
    )
    only_mlp = set(config.counts("mlp_only_layers", None) or ())
    return routed, lambda i: i < first_dense or i in only_mlp or (i + 1) % step != 0


def _draft(config: Config, hidden: int, layers: tuple[Layer, ...]) -> tuple[Tensor, ...]:
    """The multi-token-prediction module, as one more layer of the last kind and its entrance."""
    count = config.get("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0
    if not count:
        return ()
    last = layers[-1]
    return (plain("draft_entrance", hidden, 2 * hidden, "draft"), *last.tensors) * int(count)
