"""Graph-capture cases: transformers' own models from tiny configs with random weights, a forward and a decode step.

They need transformers, so they stand apart from the other case files. The inputs are token ids of a whole batch,
one new token a row, and its position.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import inspect

import torch
from tests.port.capture.cases.setting import registry

CASES, case = registry(globals())
VOCAB, PROMPT, CACHE = 128, 16, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(family, **options):
    import transformers

    torch.manual_seed(0)
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **EXPERTS, sliding_window=8),
    }[family]()
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


class State:
    """A model and its cache, made at the first call, as they would be at start-up."""

    def __init__(self, dev):
        self.dev = dev
        self.model = None
        self.cache = None

    def load(self, family, **options):
        if self.model is None:
            self.model = build(family, **options).to(self.dev)
        return self.model

    def prefill(self, model, tokens):
        if self.cache is None:
            from transformers import StaticCache

            self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
            step(model, tokens, torch.arange(tokens.shape[1], device=tokens.device), self.cache)
        return self.cache


def step(model, tokens, position, cache):
    """One call that writes into a static cache; releases differ in whether they take the cache's positions."""
    more = {"cache_position": position} if "cache_position" in inspect.signature(model.forward).parameters else {}
    return model(
        input_ids=tokens,
        position_ids=position.expand(tokens.shape[0], -1),
        past_key_values=cache,
        use_cache=True,
        **more,
    ).logits


def forward(s, family, tokens, **options):
    with torch.no_grad():
        return s.load(family, **options)(input_ids=tokens, use_cache=False).logits


def decode(s, family, tokens, token, position, **options):
    with torch.no_grad():
        model = s.load(family, **options)
        return step(model, token, position, s.prefill(model, tokens))


case("llama_forward", lambda s, tokens, token, position: forward(s, "llama", tokens))


@case
def llama_forward_eager_attention(s, tokens, token, position):
    return forward(s, "llama", tokens, attn_implementation="eager")


@case
def llama_forward_padding_mask(s, tokens, token, position):
    with torch.no_grad():
        model = s.load("llama")
        return model(input_ids=tokens, attention_mask=(tokens > 20).long(), use_cache=False).logits


@case
def llama_forward_dynamic_cache(s, tokens, token, position):
    with torch.no_grad():
        return s.load("llama")(input_ids=tokens, use_cache=True).logits


case("llama_decode", lambda s, tokens, token, position: decode(s, "llama", tokens, token, position))
case("qwen3_forward", lambda s, tokens, token, position: forward(s, "qwen3", tokens))
case("qwen3_decode", lambda s, tokens, token, position: decode(s, "qwen3", tokens, token, position))
case("mixtral_forward", lambda s, tokens, token, position: forward(s, "mixtral", tokens))


@case
def mixtral_forward_eager_experts(s, tokens, token, position):
    return forward(s, "mixtral", tokens, experts_implementation="eager")


@case
def mixtral_forward_batched_experts(s, tokens, token, position):
    return forward(s, "mixtral", tokens, experts_implementation="batched_mm")


case("mixtral_decode", lambda s, tokens, token, position: decode(s, "mixtral", tokens, token, position))
case("gpt_oss_forward", lambda s, tokens, token, position: forward(s, "gpt_oss", tokens))


@case
def gpt_oss_forward_eager_experts(s, tokens, token, position):
    return forward(s, "gpt_oss", tokens, experts_implementation="eager")


case("gpt_oss_decode", lambda s, tokens, token, position: decode(s, "gpt_oss", tokens, token, position))


def inputs(dev, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (2, PROMPT), generator=generator)
    token = torch.randint(3, VOCAB, (2, 1), generator=generator)
    return tokens.to(dev), token.to(dev), torch.tensor([PROMPT + seed]).to(dev)
