"""Attention kinds: a config's numbers in, a layer's tensors and what it scans out.

Shapes follow the definitions in transformers 5.22 and vLLM 0.32; docs/model.md has the formulas.
"""

from dataclasses import dataclass

from crosstie.catalog.config import Config
from crosstie.core.model import Scan, State, Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    kind: str
    tensors: tuple[Tensor, ...]
    scans: tuple[Scan, ...] = ()
    state: State | None = None
    # 16-bit elements per token that rotary embedding, norms and gates move, split over TP.
    moved_elements: float = 0.0


def vector(name: str, size: int) -> Tensor:
    return Tensor(name=name, role="small", rows=size)


def plain(name: str, rows: int, cols: int, kernel: str, role: str = "attention") -> Tensor:
    """A projection that every tensor-parallel rank holds whole."""
    return Tensor(name=name, role=role, rows=rows, cols=cols, kernel=kernel)


def split_out(name: str, rows: int, cols: int, kernel: str, role: str = "attention", heads: int = 1 << 30) -> Tensor:
    return Tensor(name=name, role=role, rows=rows, cols=cols, shard="out", max_shards=heads, kernel=kernel)


def split_in(name: str, rows: int, cols: int, kernel: str, role: str = "attention") -> Tensor:
    return Tensor(name=name, role=role, rows=rows, cols=cols, shard="in", kernel=kernel)


def grouped_attention(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    window_read_fraction: float = 1.0,
    output_gate: bool = False,
    head_gate: bool = False,
    key_is_value: bool = False,
    qk_norm: str = "none",
    bias: bool = False,
    output_bias: bool = False,
    sinks: bool = False,
    top_rows: int | None = None,
    index: tuple[int, int] | None = None,
) -> Attention:
    """Multi-head, grouped-query and multi-query attention, full, over a window, or over rows that an index chose.

    `index`: heads and width of the index; one key of that width a token, kept in 16 bits.
    """
    q_rows = heads * head_dim * (2 if output_gate else 1)
    kv_rows = kv_heads * head_dim
    tensors = [
        split_out("q", q_rows, hidden, "qkv"),
        split_out("k", kv_rows, hidden, "qkv", "key", heads=kv_heads),
        split_in("o", hidden, heads * head_dim, "o", "output"),
    ]
    if not key_is_value:
        tensors.insert(2, split_out("v", kv_rows, hidden, "qkv", "value", heads=kv_heads))
    if head_gate:
        tensors.append(split_out("head_gate", heads, hidden, "gate", "auxiliary"))
    if bias:
        tensors.append(vector("qkv_bias", q_rows + 2 * kv_rows))
    if output_bias:
        tensors.append(vector("o_bias", hidden))
    if qk_norm == "head":
        tensors.append(vector("qk_norm", 2 * head_dim))
    elif qk_norm == "full":
        tensors.append(vector("qk_norm", (heads + kv_heads) * head_dim))
    if sinks:
        tensors.append(vector("sinks", heads))
    flop = 4.0 * heads * head_dim
    scan = Scan(
        name="window" if window else "full",
        row_bytes_16bit=4.0 * kv_rows,
        row_bytes_8bit=2.0 * kv_rows,
        decode_flop=flop,
        prefill_flop=flop,
        window=window,
        window_read_fraction=window_read_fraction,
        top_rows=top_rows,
        kv_heads=kv_heads,
        query_heads=heads,
    )
    scans: tuple[Scan, ...] = (scan,)
    if index:
        index_heads, index_dim = index
        tensors += [
            plain("index_q", index_heads * index_dim, hidden, "index"),
            plain("index_k", index_dim, hidden, "index"),
            vector("index_norm", 2 * index_dim),
        ]
        flop_of_index = 2.0 * index_heads * index_dim
        scans += (
            Scan(
                name="index", row_bytes_16bit=2.0 * index_dim, row_bytes_8bit=2.0 * index_dim,
                decode_flop=flop_of_index, prefill_flop=flop_of_index,
            ),
        )  # fmt: skip
    ratio = "mha" if kv_heads == heads else ("mqa" if kv_heads == 1 else "gqa")
    name = ratio if window is None else f"{ratio}, window {window}"
    moved = 2.0 * (heads + kv_heads) * head_dim + (2.0 * heads * head_dim if output_gate else 0.0)
    if top_rows:
        name = f"{name}, sparse {top_rows}"
    return Attention(name, tuple(tensors), scans, None, moved)


def latent_attention(
    config: Config, *, hidden: int, heads: int, output_gate: bool = False, indexer: bool = True
) -> Attention:
    """DeepSeek's MLA. Decode multiplies in the latent space (absorbed); prefill in head space.

    With an indexer (V3.2, GLM-5) a query scans a small index of every token and then reads only the
    `index_topk` best rows of the cache; without one of its own a layer reads those that an earlier layer chose.
    """
    rank = config.count("kv_lora_rank")
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim", least=0)
    value = config.count("v_head_dim")
    q_rank = config.maybe("q_lora_rank")
    tensors: list[Tensor] = []
    if q_rank:
        tensors += [plain("q_a", q_rank, hidden, "a"), vector("q_a_norm", q_rank)]
        tensors.append(split_out("q_b", heads * (nope + rope), q_rank, "q_b"))
    else:
        tensors.append(split_out("q", heads * (nope + rope), hidden, "q_b"))
    tensors += [
        plain("kv_a", rank + rope, hidden, "a"),
        vector("kv_a_norm", rank),
        split_out("kv_b", heads * (nope + value), rank, "kv_b", "value"),
        split_in("o", hidden, heads * value, "o", "output"),
    ]
    if output_gate:
        tensors.append(split_out("gate", heads * value, hidden, "gate"))
    decode_flop = 2.0 * heads * (rank + rope) + 2.0 * heads * rank
    prefill_flop = 2.0 * heads * (nope + rope) + 2.0 * heads * value
    top = config.maybe("index_topk")
    scans: tuple[Scan, ...] = (
        Scan(
            name="latent", row_bytes_16bit=2.0 * (rank + rope), row_bytes_8bit=float(rank + rope),
            decode_flop=decode_flop, prefill_flop=prefill_flop, query_heads=heads,
        ),
    )  # fmt: skip
    kind = "mla"
    if top:
        kind = f"mla, sparse {top}"
        index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
        if indexer:
            tensors += [
                plain("index_q", index_heads * index_dim, q_rank or hidden, "index"),
                plain("index_k", index_dim, hidden, "index"),
                vector("index_k_norm", 2 * index_dim),
                plain("index_weights", index_heads, hidden, "index", "auxiliary"),
            ]
        # 8-bit rows: the latent part in FP8 with one FP32 scale per 128, the rotary part in 16 bits.
        row_8bit = rank + 4 * (rank / 128) + 2 * rope
        scans = (
            Scan(
                name="latent, selected", row_bytes_16bit=2.0 * (rank + rope), row_bytes_8bit=row_8bit,
                decode_flop=decode_flop, prefill_flop=decode_flop, top_rows=top, query_heads=heads,
            ),
            *((index_scan(index_heads, index_dim, stride=1),) if indexer else ()),
        )  # fmt: skip
    return Attention(kind if indexer else f"{kind}, no index", tuple(tensors), scans, None, 2.0 * heads * (nope + rope))


def index_scan(heads: int, dim: int, stride: int) -> Scan:
    """The indexer's own cache: FP8 keys with one FP32 scale a row, whatever the KV format."""
    flop = 2.0 * heads * dim
    return Scan(
        name="index", row_bytes_16bit=dim + 4.0, row_bytes_8bit=dim + 4.0,
        decode_flop=flop, prefill_flop=flop, stride=stride, compute="fp8",
    )  # fmt: skip


def compressed_attention(config: Config, *, hidden: int, heads: int, ratio: int) -> Attention:
    """DeepSeek-V4: a window of recent tokens plus one row for every `ratio` older ones.

    At ratio 4 an index picks the rows to read; at ratio 128 all are read; at 0 there is the window
    alone. One vector of head_dim serves as key and value of all heads.
    """
    dim, q_rank = config.count("head_dim"), config.count("q_lora_rank")
    rope = config.count("qk_rope_head_dim")
    groups, o_rank = config.count("o_groups"), config.count("o_lora_rank")
    window = config.count("sliding_window")
    index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
    top = config.count("index_topk")
    tensors = [
        plain("q_a", q_rank, hidden, "a"),
        plain("kv", dim, hidden, "a"),
        split_out("q_b", heads * dim, q_rank, "q_b"),
        # Block-diagonal: each group projects its own heads.
        Tensor(
            name="o_a", role="attention", rows=groups * o_rank, cols=heads * dim, shard="out",
            max_shards=groups, kernel="o_a", density=1 / groups,
        ),
        split_in("o_b", hidden, groups * o_rank, "o_b", "output"),
        vector("norms", q_rank + dim + heads),
    ]  # fmt: skip
    row16, row8 = 2.0 * dim, (dim - rope) + 2.0 * rope + (dim - rope) / 64 + 1
    flop = 4.0 * heads * dim

    def rows(name: str, stride: int, window: int | None, top_rows: int | None) -> Scan:
        return Scan(
            name=name, row_bytes_16bit=row16, row_bytes_8bit=row8, decode_flop=flop, prefill_flop=flop,
            stride=stride, window=window, top_rows=top_rows, query_heads=heads,
        )  # fmt: skip

    scans = [rows("window", 1, window, None)]
    state_bytes = 0.0
    if ratio:
        overlap = 2 if ratio == 4 else 1
        tensors += compressor("compressor", hidden, dim, ratio, overlap)
        state_bytes = 2 * 4.0 * overlap * ratio * overlap * dim
        if ratio == 4:
            tensors += [
                plain("index_q", index_heads * index_dim, q_rank, "index"),
                plain("index_weights", index_heads, hidden, "index", "auxiliary"),
                *compressor("index_compressor", hidden, index_dim, ratio, overlap),
            ]
            state_bytes += 2 * 4.0 * overlap * ratio * overlap * index_dim
            scans += [rows("compressed, selected", ratio, None, top), index_scan(index_heads, index_dim, ratio)]
        else:
            scans.append(rows("compressed", ratio, None, None))
    state = State(bytes=state_bytes, decode_flop=0.0, prefill_flop=0.0) if state_bytes else None
    kind = f"compressed {ratio}" if ratio else f"window {window}"
    return Attention(kind, tuple(tensors), tuple(scans), state, 2.0 * heads * dim)


def compressor(name: str, hidden: int, dim: int, ratio: int, overlap: int) -> list[Tensor]:
    return [
        plain(f"{name}_kv", overlap * dim, hidden, name, "auxiliary"),
        plain(f"{name}_gate", overlap * dim, hidden, name, "auxiliary"),
        vector(f"{name}_position", ratio * overlap * dim + dim),
    ]


def linear_attention(
    *,
    kind: str,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv: int,
    projections: tuple[Tensor, ...],
    conv_channels: int,
    state_element_bytes: float = 4.0,
) -> Attention:
    """Gated delta rules (Qwen3.5, Kimi): a matrix state per head instead of a growing cache."""
    cells = float(value_heads * key_dim * value_dim)
    state = State(
        bytes=cells * state_element_bytes + 2.0 * conv_channels * (conv - 1),
        # Decay, read-out, correction and update touch each cell of the state; chunked prefill adds
        # the products inside a chunk of 64 tokens, about four more per cell at these sizes.
        decode_flop=6.0 * cells,
        prefill_flop=10.0 * cells,
        heads=value_heads,
    )
    moved = 2.0 * conv_channels + 2.0 * value_heads * value_dim
    return Attention(kind, projections, (), state, moved)
