"""Graph-capture cases, second set: logits processors, samplers, stop checks, speculative verification, beam steps."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import collections
import itertools

import numpy as np
import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())
EOS, EPS = 3, 1e-5


class State(setting.State):
    """Besides the common state: what a sampler keeps for each request, on the device and on the host."""

    def __init__(self, dev):
        super().__init__(dev)
        self.counts = torch.zeros(B, S, device=dev)
        self.finished = torch.zeros(B, dtype=torch.bool, device=dev)
        self.stops = torch.tensor([3, 17, 40]).to(dev)
        self.top_k = torch.tensor([4, 9]).to(dev)
        self.temperature = torch.tensor([0.0, 0.7]).to(dev)
        self.mu = torch.full((B, 1), 5.0, device=dev)
        self.past = torch.arange(B * 12).view(B, 12).remainder(7).to(dev)
        self.bits = torch.tensor([[0x0F0F0F0F, 0x7FFFFFFF], [0x33333333, 0x55555555]], dtype=torch.int32).to(dev)
        self.paths = torch.tensor([[0, 1, 4], [0, 2, 5], [0, 3, 6]]).to(dev)
        self.said = [[5, 9], [7]]
        self.generators = {0: torch.Generator(dev).manual_seed(11)}


def penalty_from_lists_of_ids(s, q, k, v, lens, score):
    width = max(map(len, s.said))
    ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in s.said], device=q.device)
    return score.scatter_add(1, ids, torch.full(ids.shape, -1.0, device=q.device))


def penalty_by_loop_over_ids(s, q, k, v, lens, score):
    logits = score.clone()
    for row, ids in enumerate(s.said):
        for token in ids:
            logits[row, token] -= 1.0
    return logits


def penalty_over_growing_list(s, q, k, v, lens, score):
    logits = score.clone()
    s.said[0].append(len(s.said[0]))
    for token in s.said[0]:
        logits[:, token] -= 1.0
    return logits


def frequency_counts_on_device(s, q, k, v, lens, score):
    logits = score - 0.5 * s.counts
    token = logits.argmax(-1, keepdim=True)
    s.counts.scatter_add_(1, token, torch.ones_like(token, dtype=s.counts.dtype))
    return token


def banned_columns_by_python_int(s, q, k, v, lens, score):
    logits = score.clone()
    for token in (EOS, 11, 30):
        logits[:, token] = float("-inf")
    return logits.softmax(-1)


def minimum_length_by_host_step(s, q, k, v, lens, score):
    logits = score.clone()
    if s.calls < 5:
        logits[:, EOS] = -1e9
    s.calls += 1
    return logits.softmax(-1)


def minimum_length_by_device_step(s, q, k, v, lens, score):
    eos = torch.arange(S, device=q.device) == EOS
    logits = score.masked_fill(eos & (s.step < 5), -1e9)
    s.step += 1
    return logits.softmax(-1)


def top_k_of_each_request(s, q, k, v, lens, score):
    ordered = score.sort(-1, descending=True).values
    floor = ordered.gather(1, (s.top_k - 1).unsqueeze(1))
    return score.masked_fill(score < floor, float("-inf")).softmax(-1)


def settings_uploaded_pinned(s, q, k, v, lens, score):
    top_p = torch.tensor([0.9, 0.5], pin_memory=q.is_cuda).to(q.device, non_blocking=True)
    ordered = score.softmax(-1).sort(-1).values
    return (ordered.cumsum(-1) > 1 - top_p.view(B, 1)).sum(-1)


def greedy_if_any_cold(s, q, k, v, lens, score):
    if (s.temperature < EPS).any():
        return score.argmax(-1)
    return (score / s.temperature.view(B, 1)).argmin(-1)


def greedy_where_cold(s, q, k, v, lens, score):
    safe = torch.where(s.temperature < EPS, 1.0, s.temperature).view(B, 1)
    return torch.where(s.temperature < EPS, score.argmax(-1), (score / safe).softmax(-1).cumsum(-1).lt(0.5).sum(-1))


def noise_from_request_generators(s, q, k, v, lens, score):
    noise = torch.empty_like(score).fill_(1.0)
    for row, generator in s.generators.items():
        noise[row].exponential_(generator=generator)
    return (score.softmax(-1) / noise).sum()


def grammar_bits_unpacked(s, q, k, v, lens, score):
    allowed = (s.bits.unsqueeze(-1) >> torch.arange(32, device=q.device)) & 1
    return score.masked_fill(allowed.view(B, S) == 0, -1e9).argmax(-1)


def grammar_bits_from_numpy(s, q, k, v, lens, score):
    allowed = np.zeros((B, S), dtype=bool)
    allowed[:, ::3] = True
    return score.masked_fill(~torch.from_numpy(allowed).to(q.device, non_blocking=True), -1e9).argmax(-1)


def rank_of_sampled_token(s, q, k, v, lens, score):
    logprobs = score.log_softmax(-1)
    chosen = logprobs.gather(1, lens.view(B, 1))
    return torch.cat([chosen, logprobs.topk(5).values], 1), (logprobs >= chosen).sum(-1)


def stop_ids_kept_on_device(s, q, k, v, lens, score):
    token = score.argmax(-1)
    s.finished |= (token.view(B, 1) == s.stops).any(-1)
    return torch.where(s.finished, 0, token)


def rejection_sampler_on_device(s, q, k, v, lens, score):
    draft, uniform = score[:, :5].softmax(-1), score[:, 5:10].sigmoid()
    accepted = (uniform <= score[:, 10:15].softmax(-1) / draft).int().cumprod(1)
    ids = torch.where(accepted.bool(), score[:, :5].argsort(-1), -1)
    bonus = torch.where(accepted.sum(1) == 5, score.argmax(-1), -1)
    return torch.cat([ids, bonus.view(B, 1)], 1)


def rejection_output_parsed(s, q, k, v, lens, score):
    ids = torch.where(score[:, :5] > 0, lens.view(B, 1), -1)
    rows = [row[row != -1] for row in ids]
    return q * sum(row.numel() for row in rows)


def ngram_ban_by_windows(s, q, k, v, lens, score):
    windows = s.past.unfold(1, 3, 1)
    match = (windows[:, :, :2] == s.past[:, None, -2:]).all(-1)
    ban = torch.zeros_like(score).scatter_add_(1, windows[:, :, 2], match.to(score.dtype))
    return score - 10 * ban


def ngram_ban_by_dictionary(s, q, k, v, lens, score):
    seen = collections.defaultdict(list)
    tokens = s.past[0].tolist()
    for a, b in itertools.pairwise(tokens):
        seen[a].append(b)
    return score - len(seen)


def beam_step_flat_topk(s, q, k, v, lens, score):
    total = score.log_softmax(-1) + score[:, :1]
    value, flat = total.view(1, -1).topk(2 * B)
    return value, flat // S, flat % S


def beam_step_finished_list(s, q, k, v, lens, score):
    value, flat = score.view(-1).topk(4)
    kept = [v_ for v_, f in zip(value, flat, strict=True) if f % S != EOS]
    return torch.stack(kept[:2])


def surprise_target_in_place(s, q, k, v, lens, score):
    p = score.softmax(-1)
    surprise = -(p * p.log()).sum(-1, keepdim=True)
    s.mu.sub_(0.1 * (surprise - 3.0))
    return score.masked_fill(-p.log() > s.mu, -1e9)


def surprise_target_rebound(s, q, k, v, lens, score):
    p = score.softmax(-1)
    surprise = -(p * p.log()).sum(-1, keepdim=True)
    s.mu = s.mu - 0.1 * (surprise - 3.0)
    return score + s.mu


CASES |= collected(globals())
