"""A small decoder in plain PyTorch with what real ones have: rotary angles, grouped heads, a gate, capped logits.

It needs torch alone, so that the same file runs on a machine with a GPU: `python small.py OUT` records it there.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, LAYERS, VOCABULARY, TOKENS = 256, 8, 4, 32, 512, 4, 512, 24
CAP = 8.0


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    scaling = 4.0

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = 10_000.0 ** (-torch.arange(0, WIDTH, 2, device=positions.device).float() / WIDTH)
        angles = positions[..., None].float() / self.scaling * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=True)
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.scale = 1.0 / math.sqrt(WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, tokens, -1, WIDTH).transpose(1, 2)

        q, k = rotated(heads(self.q_proj(x)), cos, sin), rotated(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x)).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).transpose(2, 3) * self.scale
        hidden = torch.full((tokens, tokens), -torch.inf, device=x.device).triu(1)
        weights = (scores.float() + hidden).softmax(-1).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.act = nn.SiLU()
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attn = RMSNorm(HIDDEN), Attention()
        self.post_norm, self.mlp = RMSNorm(HIDDEN), MLP()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Cap(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return CAP * torch.tanh(logits / CAP)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.rotary = RotaryEmbedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head, self.cap = RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False), Cap()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return self.cap(self.head(self.norm(x)))


def model(dtype: torch.dtype = torch.float32) -> Small:
    """The same weights on every machine: drawn on the processor, in float32."""
    torch.manual_seed(1)
    made = Small()
    for name, one in made.named_parameters():
        # Logits large enough that the cap matters, and biases that bfloat16 can see.
        spread = 3.0 if name == "head.weight" else 1.0
        if one.ndim > 1:
            nn.init.normal_(one, std=spread / math.sqrt(one.shape[-1]))
        elif name.endswith("bias"):
            nn.init.normal_(one, std=0.5)
    return made.to(dtype).eval()


def tokens() -> torch.Tensor:
    return (torch.arange(TOKENS) * 7919 % VOCABULARY)[None]


def main(out: Path, device: str) -> None:
    from crosstie_port.divergence.recording import record

    for dtype in (torch.float32, torch.bfloat16):
        name = f"{device}-{str(dtype).removeprefix('torch.')}"
        made = model(dtype).to(device)
        with torch.inference_mode(), record(made, out / f"{name}.npz", head=WIDTH):
            made(tokens().to(device))
        with torch.no_grad():
            made.layers[2].mlp.down_proj.weight *= 0.5
        with torch.inference_mode(), record(made, out / f"{name}-halved.npz", head=WIDTH):
            made(tokens().to(device))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu")
