"""What drafts for a model: its own prediction layer, or a head of the usual size trained for it."""

from msgspec.structs import replace

from crosstie.catalog.attention import grouped_attention, plain, split_out, vector
from crosstie.catalog.feedforward import dense
from crosstie.core.errors import BadInput
from crosstie.core.model import Layer, Model, Tensor
from crosstie.core.speculation import Method

# Heads of EAGLE-3 as published: one Llama layer as wide as the model, a vocabulary of its own.
_HEAD_DIM, _HEAD_KV_HEADS, _HEAD_VOCABULARY = 128, 8, 32_000
_HEAD_INNER = 3.5


def drafter_of(model: Model, method: Method, draft: Model | None = None) -> Model | None:
    """The layers and the head that a pass of the drafter goes through, as a model of their own."""
    if method == "ngram":
        return None
    if method == "draft":
        if draft is None:
            raise BadInput(f"speculation draft: the model that drafts for {model.id} is not named")
        if draft.vocabulary != model.vocabulary:
            raise BadInput(
                f"speculation draft: {draft.id} has {draft.vocabulary:,} tokens and {model.id} {model.vocabulary:,}: "
                "what one proposes the other cannot verify"
            )
        if draft.active_parameters >= model.active_parameters:
            raise BadInput(f"speculation draft: {draft.id} is no smaller than {model.id}")
        return draft
    if method == "mtp":
        if not model.draft_tensors:
            raise BadInput(f"speculation mtp: {model.id} has no prediction layer")
        return _prediction_layer(model)
    return _head(model, method)


def _prediction_layer(model: Model) -> Model:
    """One more layer of the last kind with its entrance; embedding and output are the model's own."""
    last = model.layers[-1]
    entrance = plain("draft_entrance", model.hidden, 2 * model.hidden, "draft")
    layer = replace(last, count=1, kind=f"prediction, {last.kind}", tensors=(entrance, *last.tensors))
    # A tied embedding is the head, and both are stored once.
    return _of(model, "mtp", (layer,), tuple(tensor for tensor in model.outer if tensor.kernel))


def _head(model: Model, method: Method) -> Model:
    """Its weights are in 16 bits, whatever the model's are."""
    hidden = model.hidden
    attention = grouped_attention(
        hidden=hidden, heads=max(hidden // _HEAD_DIM, 1), kv_heads=_HEAD_KV_HEADS, head_dim=_HEAD_DIM
    )
    forward = dense(hidden, round(_HEAD_INNER * hidden))
    # Features of three layers enter; attention sees them beside the last token.
    entrance = plain("draft_entrance", hidden, 3 * hidden, "draft", "auxiliary")
    inside = tuple(_wide(tensor, hidden) for tensor in (*attention.tensors, *forward.tensors))
    layer = Layer(
        kind="draft head",
        count=1,
        tensors=(entrance, *inside, vector("draft_norms", 3 * hidden)),
        scans=attention.scans,
        elementwise_bytes=2.0 * 8.0 * hidden,
        elementwise_sharded_bytes=2.0 * (attention.moved_elements + forward.moved_elements),
    )
    head = split_out("draft_head", min(_HEAD_VOCABULARY, model.vocabulary), hidden, "head", "head")
    return _of(model, method, (layer,), (head,))


def _wide(tensor: Tensor, hidden: int) -> Tensor:
    cols = 2 * hidden if tensor.kernel == "qkv" else tensor.cols
    return replace(tensor, cols=cols, role="small" if tensor.role == "small" else "auxiliary")


def _of(model: Model, method: Method, layers: tuple[Layer, ...], outer: tuple[Tensor, ...]) -> Model:
    routed = [tensor for layer in layers for tensor in layer.tensors if tensor.role == "experts"]
    return replace(
        model,
        id=f"{model.id}:{method}",
        name=f"{model.name} {method}",
        aliases=(),
        layers=layers,
        outer=outer,
        draft_tensors=(),
        experts=max((tensor.copies for tensor in routed), default=0),
        experts_per_token=max((tensor.active for tensor in routed), default=0),
    )
