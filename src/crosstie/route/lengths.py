"""How long prompts and answers are, before anybody has counted them: learnt from what was served;
and which class a request belongs to that names none."""

from math import log
from typing import Final

from crosstie.core.fleet import Fleet, ServedClass
from crosstie.core.images import ImageRule
from crosstie.route.ask import Ask
from crosstie.route.prefix import BLOCK_BYTES

# Text with its JSON around it, until usage says otherwise.
_BYTES_PER_TOKEN: Final = 4.0
_OUTPUT_TOKENS: Final = 256.0
# What one picture, or a piece of sound or film, is counted as in tokens where nobody knows better.
TOKENS_PER_ATTACHMENT: Final = 1000.0
# Requests that the starting value counts for, and after how many the past is half forgotten.
_PRIOR_REQUESTS: Final = 20.0
_MEMORY_REQUESTS: Final = 500.0
_PRIOR_TOKENS: Final = 4000.0
# Of a short prompt, most tokens are the chat template's: nothing is learnt from it about text.
_LEAST_TOKENS: Final = 200
_MEMORY_TOKENS: Final = 1e6


class _Mean:
    """A mean that starts somewhere and forgets; both sums are kept, so that large items weigh more."""

    def __init__(self, start: float, weight: float, memory: float):
        self.above, self.below, self.memory = start * weight, weight, memory

    def add(self, above: float, below: float) -> None:
        if self.below + below > self.memory:
            kept = self.memory / (self.below + below)
            self.above, self.below = self.above * kept, self.below * kept
        self.above += above
        self.below += below

    @property
    def value(self) -> float:
        return self.above / self.below


class Lengths:
    """Expected answers by class, and by model where there is no class; bytes of a token by model."""

    def __init__(self, classes: tuple[ServedClass, ...] = ()):
        self._by_class = {one.name: self._mean(one.output_tokens) for one in classes}
        self._by_model: dict[str, _Mean] = {}
        self._bytes: dict[str, _Mean] = {}
        # How models that the catalog knows cut pictures up.
        self.images: dict[str, ImageRule] = {}
        models: dict[str, list[ServedClass]] = {}
        for served_class in classes:
            models.setdefault(served_class.model, []).append(served_class)
        for model, of in models.items():
            rate = sum(one.requests_per_s for one in of)
            weights = [one.requests_per_s / rate if rate > 0 else 1.0 / len(of) for one in of]
            self._by_model[model] = self._mean(sum(w * c.output_tokens for w, c in zip(weights, of, strict=True)))

    @staticmethod
    def _mean(start: float) -> _Mean:
        return _Mean(start, _PRIOR_REQUESTS, _MEMORY_REQUESTS)

    def expected_output(self, class_name: str | None, model: str, most_output: int | None) -> float:
        mean = self._by_class.get(class_name) if class_name is not None else None
        if mean is None:
            mean = self._by_model.get(model)
        expected = _OUTPUT_TOKENS if mean is None else mean.value
        if most_output is not None and float(most_output) < expected:
            expected = float(most_output)
        return expected if expected > 1.0 else 1.0

    def bytes_per_token(self, model: str) -> float:
        mean = self._bytes.get(model)
        return _BYTES_PER_TOKEN if mean is None else mean.value

    def block_tokens(self, model: str) -> float:
        """Tokens of a block of `route.prefix`."""
        return BLOCK_BYTES / self.bytes_per_token(model)

    def tokens_a_block(self, ask: Ask) -> float:
        """Of this prompt: one that comes as ids of tokens has more bytes a token than text."""
        usual = self.block_tokens(ask.model)
        return min(usual, ask.input_tokens / len(ask.prefix)) if ask.prefix else usual

    def input_tokens(self, model: str, prompt_bytes: int) -> float:
        tokens = prompt_bytes / self.bytes_per_token(model)
        return tokens if tokens > 1.0 else 1.0

    def image_tokens(self, model: str, width: int = 0, height: int = 0) -> float:
        """Tokens of a picture; without a size, of one that nothing is known of."""
        rule = self.images.get(model)
        if rule is None:
            return TOKENS_PER_ATTACHMENT
        seen = rule.seen(width, height) if width > 0 and height > 0 else rule.unknown
        return TOKENS_PER_ATTACHMENT if seen is None else float(seen.tokens)

    def observe(
        self,
        class_name: str | None,
        model: str,
        *,
        output_tokens: int | None,
        input_tokens: int | None = None,
        prompt_bytes: int = 0,
    ) -> None:
        """What a completed request turned out to be; None: nobody said."""
        if output_tokens is not None and output_tokens > 0:
            by_class = None if class_name is None else self._by_class.get(class_name)
            if by_class is not None:
                by_class.add(float(output_tokens), 1.0)
            by_model = self._by_model.get(model)
            if by_model is None:
                by_model = self._by_model[model] = self._mean(_OUTPUT_TOKENS)
            by_model.add(float(output_tokens), 1.0)
        if input_tokens and input_tokens >= _LEAST_TOKENS and prompt_bytes:
            mean = self._bytes.setdefault(model, _Mean(_BYTES_PER_TOKEN, _PRIOR_TOKENS, _MEMORY_TOKENS))
            # More than a token a byte, or a token of many words, is something else than text that was read.
            if 0.5 <= prompt_bytes / input_tokens <= 16:
                mean.add(float(prompt_bytes), float(input_tokens))

    def keep(self, previous: "Lengths") -> None:
        """What was learnt before a reload, for the classes that are still there."""
        self._by_class.update({name: mean for name, mean in previous._by_class.items() if name in self._by_class})
        self._by_model.update(previous._by_model)
        self._bytes.update(previous._bytes)


class Classes:
    """Of each model the fleet's default class, if it is of that model; else the one nearest in prompt length."""

    def __init__(self, fleet: Fleet):
        self._sizes: dict[str, list[tuple[float, ServedClass]]] = {}
        for one in fleet.classes:
            self._sizes.setdefault(one.model, []).append((log(max(one.input_tokens, 1.0)), one))
        for sizes in self._sizes.values():
            usual = [entry for entry in sizes if entry[1].name == fleet.serving.default_class]
            sizes[:] = usual or sizes

    def of(self, model: str, input_tokens: float) -> ServedClass | None:
        sizes = self._sizes.get(model)
        if sizes is None:
            return None
        if len(sizes) == 1:
            return sizes[0][1]
        size = log(input_tokens if input_tokens > 1.0 else 1.0)
        return min(sizes, key=lambda entry: abs(entry[0] - size))[1]
