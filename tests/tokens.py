"""A small tokenizer with a chat template, written where a test wants it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

SPECIAL = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SAID = ["You answer briefly. What is a fleet? And a pool? Ships. This answer is emulated by Crosstie.", "0 1 2 3 4 5"]


@cache
def _json() -> str:
    import tokenizers

    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_SAID, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", made.token_to_id("<|bos|>"))]
    )
    said: str = made.to_str()
    return said


def written(folder: Path) -> Path:
    """The tokenizer.json of a model in a folder, with its template beside it."""
    (folder / "tokenizer.json").write_text(_json())
    config = {"bos_token": {"content": SPECIAL[0]}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
