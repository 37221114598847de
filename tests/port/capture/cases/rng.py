"""Graph-capture cases: randomness and sampling. The device's own generator advances at replay; a host's does not."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import random

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def random_case(function):
    """The device draws anew at each replay: outputs are compared in shape, and two replays must differ."""
    function.random = True
    return case(function)


@random_case
def device_rand(s, q, k, v, lens, score):
    return q * torch.rand(q.shape, device=q.device)


@random_case
def device_randn_like(s, q, k, v, lens, score):
    return q + torch.randn_like(q)


@random_case
def device_dropout(s, q, k, v, lens, score):
    return F.dropout(k, 0.5, training=True)


case("dropout_in_eval", lambda s, q, k, v, lens, score: F.dropout(k, 0.5, training=False))


@random_case
def dropout_in_attention(s, q, k, v, lens, score):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


@random_case
def device_normal_in_place(s, q, k, v, lens, score):
    return q + s.buf.normal_().sum()


@random_case
def device_uniform_in_place(s, q, k, v, lens, score):
    return q + torch.empty(8, device=q.device).uniform_().sum()


@random_case
def exponential_race(s, q, k, v, lens, score):
    noise = torch.empty_like(score).exponential_()
    return q + (score.softmax(-1) / noise).argmax(-1).float().mean() + noise.sum()


@random_case
def gumbel_softmax(s, q, k, v, lens, score):
    return F.gumbel_softmax(score)


@random_case
def device_bernoulli(s, q, k, v, lens, score):
    return k * torch.bernoulli(torch.full_like(k, 0.5))


@random_case
def device_randint(s, q, k, v, lens, score):
    return torch.randint(0, 1000, (B, S), device=q.device)


@random_case
def device_randperm(s, q, k, v, lens, score):
    return k[:, :, torch.randperm(S, device=q.device)]


@random_case
def multinomial_one(s, q, k, v, lens, score):
    return torch.multinomial(torch.ones(64, 512, device=q.device), 1)


@random_case
def multinomial_with_replacement(s, q, k, v, lens, score):
    return torch.multinomial(score.softmax(-1), 32, replacement=True)


@random_case
def multinomial_without_replacement(s, q, k, v, lens, score):
    return torch.multinomial(score.softmax(-1), 32)


@random_case
def rrelu_training(s, q, k, v, lens, score):
    return F.rrelu(k, training=True)


@random_case
def poisson_draw(s, q, k, v, lens, score):
    return torch.poisson(k.abs() * 5)


@random_case
def categorical_distribution(s, q, k, v, lens, score):
    return torch.distributions.Categorical(logits=score).sample((32,))


@random_case
def categorical_without_validation(s, q, k, v, lens, score):
    return torch.distributions.Categorical(logits=score, validate_args=False).sample((32,))


@random_case
def normal_distribution_validated(s, q, k, v, lens, score):
    return torch.distributions.Normal(q, q.abs() + 1).sample()


case("host_rand_to_device", lambda s, q, k, v, lens, score: q * torch.rand(q.shape).to(q.device))


def host_rand_pinned(s, q, k, v, lens, score):
    torch.rand(8, out=s.pinned)
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


case("host_randint_item", lambda s, q, k, v, lens, score: q * torch.randint(0, 1000, ()).item())
case("host_randperm_index", lambda s, q, k, v, lens, score: k[:, :, torch.randperm(S)])


def host_shuffle_of_list(s, q, k, v, lens, score):
    order = list(range(8))
    random.shuffle(order)
    return torch.cat([score[:, i : i + 1] for i in order], 1)


def manual_seed_inside(s, q, k, v, lens, score):
    torch.manual_seed(0)
    return q * 2


@random_case
def manual_seed_then_rand(s, q, k, v, lens, score):
    torch.manual_seed(0)
    return q * torch.rand(q.shape, device=q.device)


@random_case
def seeded_generator_made_inside(s, q, k, v, lens, score):
    generator = torch.Generator(device=q.device).manual_seed(3)
    return q * torch.rand(q.shape, device=q.device, generator=generator)


@random_case
def generator_kept_unregistered(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.Generator(device=q.device).manual_seed(3)
    return q * torch.rand(q.shape, device=q.device, generator=s.cache)


def host_generator_kept(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.Generator().manual_seed(3)
    return q * torch.rand((), generator=s.cache)


def host_generator_reseeded(s, q, k, v, lens, score):
    generator = torch.Generator().manual_seed(3)
    return q * torch.rand((), generator=generator)


def rng_state_read(s, q, k, v, lens, score):
    torch.get_rng_state()
    return q * 2


def device_rng_state_read(s, q, k, v, lens, score):
    if s.dev == "cuda":
        torch.cuda.get_rng_state()
    return q * 2


case("greedy_argmax", lambda s, q, k, v, lens, score: score.argmax(-1))
case("greedy_argmax_tolist", lambda s, q, k, v, lens, score: q * sum(score.argmax(-1).tolist()))


def top_k_filter(s, q, k, v, lens, score):
    kth = score.topk(8).values[:, -1:]
    return score.masked_fill(score < kth, float("-inf")).softmax(-1)


def top_k_filter_bool_assign(s, q, k, v, lens, score):
    logits = score.clone()
    logits[logits < logits.topk(8).values[:, -1:]] = float("-inf")
    return logits.softmax(-1)


case("top_k_of_data", lambda s, q, k, v, lens, score: q * score.topk(int(lens[0])).values.sum())


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


def min_p_filter(s, q, k, v, lens, score):
    p = score.softmax(-1)
    return torch.where(p < 0.1 * p.amax(-1, keepdim=True), 0.0, p)


def repetition_penalty(s, q, k, v, lens, score):
    seen = score.gather(1, lens.view(B, 1))
    return score.scatter(1, lens.view(B, 1), torch.where(seen > 0, seen / 1.2, seen * 1.2))


def finished_all_check(s, q, k, v, lens, score):
    finished = score.argmax(-1) == 3
    return q if finished.all() else q * 2


def finished_padded(s, q, k, v, lens, score):
    finished = score.argmax(-1) == 3
    return torch.where(finished, 0, score.argmax(-1))


case("logprobs_of_chosen", lambda s, q, k, v, lens, score: score.log_softmax(-1).gather(-1, lens.view(B, 1)))


def logits_processor_dict(s, q, k, v, lens, score):
    bias = {3: 1.5, 7: -2.0}
    logits = score.clone()
    for token, value in bias.items():
        logits[:, token] += value
    return logits.softmax(-1)


def draft_accept_length(s, q, k, v, lens, score):
    agree = (score[0, :8] > 0).int()
    return q * agree.cumprod(0).sum()


def draft_accept_item(s, q, k, v, lens, score):
    accepted = (score[0, :8] > 0).int().cumprod(0).sum().item()
    return q * score[:, : accepted + 1].sum()


def draft_accept_gathered(s, q, k, v, lens, score):
    accepted = (score[:, :8] > 0).int().cumprod(1).sum(1, keepdim=True)
    return score.gather(1, accepted)


@random_case
def draft_accept_random(s, q, k, v, lens, score):
    ratio = score.sigmoid()
    return (torch.rand_like(ratio) < ratio).int().cumprod(1).float() + torch.rand_like(ratio)


def stop_token_in_list(s, q, k, v, lens, score):
    token = score.argmax(-1)[0]
    return q if token in [3, 5] else q * 2


def stop_token_isin(s, q, k, v, lens, score):
    stops = torch.arange(3, 5, device=q.device)
    return q * torch.isin(score.argmax(-1), stops).sum()


def numpy_random_scalar(s, q, k, v, lens, score):
    import numpy as np

    return q * np.random.rand()


def numpy_generator_reseeded(s, q, k, v, lens, score):
    import numpy as np

    return q * float(np.random.default_rng(7).random())


def numpy_random_vector_to_device(s, q, k, v, lens, score):
    import numpy as np

    return q * torch.from_numpy(np.random.rand(4)).to(q.device).sum()


def numpy_view_of_pinned_written(s, q, k, v, lens, score):
    s.pinned.numpy()[:] += 1
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


def numpy_constant_scalar(s, q, k, v, lens, score):
    import numpy as np

    return q * float(np.sqrt(q.shape[-1]))


CASES |= collected(globals())
