"""Prompt tokens counted by a tokenizer, beside the gateway's estimate from bytes: CPU time a prompt, and the error.

    python benchmarks/token_count.py

The tokenizer is a byte-level BPE of 32,000 entries, trained here on text that the prompts do not come from: this is
about the cost of counting and about how much bytes a token scatter, not about one model's vocabulary.
"""

import json
import random
import statistics
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from crosstie.catalog.tokenizer import Tokenizer as PromptTokenizer
from crosstie.route.lengths import Lengths

ROOT = Path(__file__).parents[1]
SIZES = (1_000, 8_000, 64_000)
ROUNDS = 200
MODEL = "any"


def texts() -> dict[str, str]:
    """Prose, code and configuration of this checkout."""
    kinds = {"prose": ("docs", "*.md"), "Python": ("src", "*.py"), "TOML": ("src", "*.toml")}
    return {
        kind: "\n".join(file.read_text() for file in sorted((ROOT / folder).rglob(ending)))
        for kind, (folder, ending) in kinds.items()
    }


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trainer = trainers.BpeTrainer(vocab_size=32_000, show_progress=False)
    tokenizer.train([str(file) for file in library], trainer)
    return tokenizer


def main() -> None:
    tokenizer, chance, lengths = trained(), random.Random(7), Lengths()
    kinds = texts()
    errors: dict[str, list[float]] = {}
    spent: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(2 * ROUNDS):
        kind = chance.choice(sorted(kinds))
        size = chance.choice(SIZES)
        at = chance.randrange(max(len(kinds[kind]) - size, 1))
        prompt = kinds[kind][at : at + size]
        began = time.process_time()
        true = len(tokenizer.encode(prompt).ids)
        spent[size].append(time.process_time() - began)
        nbytes = len(prompt.encode())
        # The first half only teaches it, as usage does in the gateway.
        if number >= ROUNDS:
            errors.setdefault(kind, []).append(abs(lengths.input_tokens(MODEL, nbytes) / true - 1))
        lengths.observe(None, MODEL, output_tokens=100, input_tokens=true, prompt_bytes=nbytes)
    began = time.process_time()
    for _ in range(100_000):
        lengths.input_tokens(MODEL, 8_000)
    print(f"estimate: {(time.process_time() - began) * 10:.2f} us a prompt")
    for size, seconds in spent.items():
        print(f"tokenizer, {size:,} characters: {statistics.median(seconds) * 1e6:,.0f} us a prompt")
    for kind, found in sorted(errors.items()):
        p90 = sorted(found)[int(0.9 * len(found))]
        print(f"error of the estimate, {kind}: median {statistics.median(found):.0%}, p90 {p90:.0%}")
    conversation(tokenizer, kinds["prose"])


def conversation(tokenizer: Tokenizer, text: str) -> None:
    """What the gateway keeps of a conversation's turns, which come again with every further one."""
    tokenizer.add_special_tokens(["<|user|>"])
    with TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        (Path(folder) / "chat_template.jinja").write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
        words = PromptTokenizer(Path(folder) / "tokenizer.json")
        turns = [{"role": "user", "content": text[at : at + 2000]} for at in range(0, 60_000, 2000)]
        spent = {"kept": 0.0, "not kept": 0.0}
        for number in range(1, len(turns) + 1):
            for how in spent:
                if how == "not kept":
                    words._kept.clear()
                began = time.process_time()
                words.read(json.dumps({"messages": turns[:number]}).encode())
                spent[how] += time.process_time() - began
            # As it would be before the next turn.
            words.read(json.dumps({"messages": turns[:number]}).encode())
    for how, seconds in spent.items():
        print(f"30 turns of 2,000 characters, {how}: {seconds / 30 * 1e3:.1f} ms a request in the mean")


if __name__ == "__main__":
    main()
