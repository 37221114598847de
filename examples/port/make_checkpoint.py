"""Writes a very small checkpoint as NVIDIA's ModelOpt quantises them: FP8 weights with one scale each.

python examples/port/make_checkpoint.py tiny-fp8
"""

import json
import sys
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
folder.mkdir()
random = np.random.default_rng(0)
hidden, inner, vocabulary, layers = 64, 128, 256, 2
tensors: dict[str, tuple[str, np.ndarray]] = {}


def half(name: str, *shape: int) -> None:
    """BF16 as its upper two bytes."""
    bits = random.normal(0, 0.02, shape).astype(np.float32).view(np.uint32)
    tensors[name] = ("BF16", (bits >> 16).astype(np.uint16))


def linear(name: str, rows: int, columns: int) -> None:
    """Codes of e4m3fn, all but its two NaN."""
    codes = random.integers(0, 127, (rows, columns)) | (random.integers(0, 2, (rows, columns)) << 7)
    tensors[f"{name}.weight"] = ("F8_E4M3", codes.astype(np.uint8))
    for scale in ("weight_scale", "input_scale"):
        tensors[f"{name}.{scale}"] = ("F32", np.array(0.01, np.float32))


half("model.embed_tokens.weight", vocabulary, hidden)
half("model.norm.weight", hidden)
half("lm_head.weight", vocabulary, hidden)
for layer in range(layers):
    prefix = f"model.layers.{layer}"
    half(f"{prefix}.input_layernorm.weight", hidden)
    half(f"{prefix}.post_attention_layernorm.weight", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear(f"{prefix}.self_attn.{name}", hidden, hidden)
    linear(f"{prefix}.mlp.gate_proj", inner, hidden)
    linear(f"{prefix}.mlp.up_proj", inner, hidden)
    linear(f"{prefix}.mlp.down_proj", hidden, inner)

header: dict[str, dict[str, object]] = {}
body = b""
for name, (kind, values) in tensors.items():
    header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": (len(body), len(body) + values.nbytes)}
    body += values.tobytes()
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
(folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": hidden,
    "intermediate_size": inner,
    "num_hidden_layers": layers,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": hidden,
    "vocab_size": vocabulary,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
(folder / "config.json").write_text(json.dumps(config, indent=2))
quantisation = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
(folder / "hf_quant_config.json").write_text(json.dumps(quantisation, indent=2))
