"""What this worker has seen of replicas and sent there, kept until it is told to other workers and peers, who learn it
as though they had seen it themselves.

Nothing depends on it: one that is lost is one observation less, and who hears of none goes by its own.
"""

from typing import Final

# Of each kind, until it is taken; nobody takes any while there is nobody to tell.
MOST: Final = 4096


class Observations:
    def __init__(self, most: int = MOST):
        self.most = most
        self.lost = 0
        self.clear()

    def clear(self) -> None:
        # By a replica's key: observed over raw and over corrected prediction, in logarithms; what it depends on, prompt
        # tokens or requests in flight; and the seconds.
        self.first: list[tuple[str, float, float, float, float]] = []
        self.decoded: list[tuple[str, float, float, float, float]] = []
        # By a replica's key: the prefix of a prompt that was sent there.
        self.sent: list[tuple[str, tuple[int, ...]]] = []
        # Class, model, output tokens, input tokens, and bytes of the prompt.
        self.lengths: list[tuple[str | None, str, int | None, int | None, int]] = []

    def __len__(self) -> int:
        return len(self.first) + len(self.decoded) + len(self.sent) + len(self.lengths)

    def saw_first(self, key: str, ratio: float, error: float, tokens: float, ttft_s: float) -> None:
        if len(self.first) < self.most:
            self.first.append((key, ratio, error, tokens, ttft_s))
        else:
            self.lost += 1

    def saw_decode(self, key: str, ratio: float, error: float, in_flight: float, tpot_s: float) -> None:
        if len(self.decoded) < self.most:
            self.decoded.append((key, ratio, error, in_flight, tpot_s))
        else:
            self.lost += 1

    def was_sent(self, key: str, prefix: tuple[int, ...]) -> None:
        if len(self.sent) < self.most:
            self.sent.append((key, prefix))
        else:
            self.lost += 1

    def saw_lengths(
        self, class_name: str | None, model: str, output_tokens: int | None, input_tokens: int | None, prompt_bytes: int
    ) -> None:
        if len(self.lengths) < self.most:
            self.lengths.append((class_name, model, output_tokens, input_tokens, prompt_bytes))
        else:
            self.lost += 1
