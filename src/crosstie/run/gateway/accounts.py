"""What has been used since it was last written down: a few numbers for each kind of request that there was."""

from crosstie.run.gateway.ended import Ended
from crosstie.run.ledger.usage import Counts, Line

# With a store that cannot be written to for days: more lines than this lose their details, and no number is lost.
_MOST_LINES = 100_000


class Accounts:
    def __init__(self) -> None:
        self.lines: dict[Line, Counts] = {}
        self.requests = 0

    def add(self, ended: Ended) -> None:
        """Counted in the hour of its end."""
        hour = int((ended.arrived_at + ended.seconds) // 3600.0) * 3600
        line: Line = (hour, ended.key_id, ended.model, ended.class_name, ended.pool, ended.how, ended.code)
        counts = self.lines.get(line)
        if counts is None:
            if len(self.lines) >= _MOST_LINES:
                line = (hour, ended.key_id, "", "", "", ended.how, "")
                counts = self.lines.get(line)
            if counts is None:
                counts = self.lines[line] = Counts()
        counts.requests += 1
        counts.counted += ended.counted
        counts.input_tokens += ended.input_tokens
        counts.output_tokens += ended.output_tokens
        counts.usd += ended.usd
        self.requests += 1

    def take(self) -> dict[Line, Counts]:
        lines, self.lines, self.requests = self.lines, {}, 0
        return lines
