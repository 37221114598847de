"""A Llama of random weights with a tokenizer trained on the text at hand, for engines that need a model and no sense.

Runs in the environment of vLLM, which has transformers and tokenizers: `python tests/engines/tiny_model.py FOLDER`.
Four layers of width 256 give hundreds of tokens a second on two cores.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 2048
CONTEXT = 2048
SEED = 7
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
# One turn a line, so that a prompt's length in tokens is easy to foresee.
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> Any:
    """Byte-level BPE on this repository's own pages."""
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    made.train_from_iterator([page.read_text() for page in pages], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(words: Any) -> Any:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make(folder: Path) -> None:
    words = tokenizer()
    words.save_pretrained(folder)
    model(words).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
