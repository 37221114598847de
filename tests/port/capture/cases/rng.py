"""Graph-capture cases: randomness and sampling. The device's own generator advances at replay; a host's does not."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import random

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def exponential_race(s, q, k, v, lens, score):
    noise = torch.empty_like(score).exponential_()
    return q + (score.softmax(-1) / noise).argmax(-1).float().mean() + noise.sum()


def generator_kept_unregistered(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.Generator(device=q.device).manual_seed(3)
    return q * torch.rand(q.shape, device=q.device, generator=s.cache)


def host_generator_kept(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.Generator().manual_seed(3)
    return q * torch.rand((), generator=s.cache)


def device_rng_state_read(s, q, k, v, lens, score):
    if s.dev == "cuda":
        torch.cuda.get_rng_state()
    return q * 2


def top_p_filter(s, q, k, v, lens, score):
    values, index = score.sort(-1, descending=True)
    drop = values.softmax(-1).cumsum(-1) - values.softmax(-1) > 0.9
    kept = values.masked_fill(drop, float("-inf"))
    return torch.empty_like(score).scatter_(-1, index, kept).softmax(-1)


def top_p_filter_bool_index(s, q, k, v, lens, score):
    values, index = score.sort(-1, descending=True)
    drop = values.softmax(-1).cumsum(-1) > 0.9
    removed = drop.scatter(1, index, drop)
    logits = score.clone()
    logits[removed] = -float("inf")
    return q * logits.exp().sum()


def repetition_penalty(s, q, k, v, lens, score):
    seen = score.gather(1, lens.view(B, 1))
    return score.scatter(1, lens.view(B, 1), torch.where(seen > 0, seen / 1.2, seen * 1.2))


def logits_processor_dict(s, q, k, v, lens, score):
    bias = {3: 1.5, 7: -2.0}
    logits = score.clone()
    for token, value in bias.items():
        logits[:, token] += value
    return logits.softmax(-1)


def draft_accept_random(s, q, k, v, lens, score):
    ratio = score.sigmoid()
    return (torch.rand_like(ratio) < ratio).int().cumprod(1).float() + torch.rand_like(ratio)


def numpy_random_scalar(s, q, k, v, lens, score):
    import numpy as np

    return q * np.random.rand()


def numpy_generator_reseeded(s, q, k, v, lens, score):
    import numpy as np

    return q * float(np.random.default_rng(7).random())


def numpy_random_vector_to_device(s, q, k, v, lens, score):
    import numpy as np

    return q * torch.from_numpy(np.random.rand(4)).to(q.device).sum()


def numpy_constant_scalar(s, q, k, v, lens, score):
    import numpy as np

    return q * float(np.sqrt(q.shape[-1]))


CASES |= collected(globals())
# The device draws anew at each replay: outputs are compared in shape, and two replays must differ.
for name in (
    "device_rand", "device_randn_like", "device_dropout", "dropout_in_attention", "device_normal_in_place",
    "device_uniform_in_place", "exponential_race", "gumbel_softmax", "device_bernoulli", "device_randint",
    "device_randperm", "multinomial_one", "multinomial_with_replacement", "multinomial_without_replacement",
    "rrelu_training", "poisson_draw", "categorical_distribution", "categorical_without_validation",
    "normal_distribution_validated", "manual_seed_then_rand", "seeded_generator_made_inside",
    "generator_kept_unregistered", "draft_accept_random",
):  # fmt: skip
    CASES[name].random = True
