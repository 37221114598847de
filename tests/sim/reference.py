"""An engine one step and one token at a time, with nothing kept that can be added up anew: slow, and plain to see.

What `sim.engine` does in stretches of steps is compared with it.
"""

from dataclasses import dataclass, field
from math import ceil

from crosstie.core.deployment import Deployment
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.engine import Engine


@dataclass(eq=False)
class Request:
    prompt: int
    output: int
    arrives_s: float
    # Of the prompt, and after it was thrown out of its own answer too, what is computed.
    computed: int = 0
    decoding: bool = False
    made: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    # Decode steps since it last began to decode, and the tokens that it had then.
    steps: int = 0
    made_before: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.made


@dataclass
class Replica:
    """One attention replica."""

    # In the order in which they were let in.
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)


class ReferenceEngine:
    """Limits are read from an engine, so that both have the same; nothing else of it is used."""

    def __init__(self, deployment: Deployment, times: StepTimes, limits: Engine):
        self.times, self.limits = times, limits
        self.block_tokens = deployment.stack.block_size
        self.replicas = [Replica() for _ in range(deployment.parallelism.dp)]
        self.preemptions = 0

    def run(self, requests: list[tuple[float, int, int]]) -> list[Request]:
        every = [Request(inputs, outputs, at + self.limits.request_s) for at, inputs, outputs in sorted(requests)]
        coming, clock, before = list(every), 0.0, 0.0
        while coming or any(one.running or one.waiting for one in self.replicas):
            # A step is made ready when the one before it begins.
            ready = before if self.limits.ready_ahead else clock
            if not any(one.running or one.waiting for one in self.replicas):
                ready = clock = max(clock, coming[0].arrives_s)
            while coming and coming[0].arrives_s <= ready:
                emptiest = min(self.replicas, key=lambda one: len(one.running) + len(one.waiting))
                emptiest.waiting.append(coming.pop(0))
            clock, before = self.step(clock), clock
        return every

    def step(self, clock: float) -> float:
        decoding = [one for replica in self.replicas for one in replica.running if one.decoding]
        chunks = [self.chunks(replica) for replica in self.replicas]
        if any(chunks) and self.limits.prefill_first:
            decoding = []
        totals = [sum(taken for _, taken in some) for some in chunks]
        fullest = totals.index(max(totals))
        before = sum(taken * (one.computed + 0.5 * taken) for one, taken in chunks[fullest])
        read = sum(one.prompt + one.made_before + one.steps * self.limits.tokens_per_step for one in decoding)
        clock += self.times.seconds(len(decoding), read, sum(totals), max(totals), before)
        for one in decoding:
            one.steps += 1
            one.made = min(one.made_before + int(one.steps * self.limits.tokens_per_step), one.output)
        for some in chunks:
            for one, taken in some:
                one.computed += taken
                if one.computed == one.known:
                    one.made += 1
                    one.decoding, one.steps, one.made_before = True, 0, one.made
                    if one.made == 1:
                        one.first_s = clock
        for replica in self.replicas:
            for one in [one for one in replica.running if one.made == one.output]:
                one.last_s = clock
                replica.running.remove(one)
            while len(replica.running) > 1 and self.full(replica):
                self.throw_out(replica)
        return clock

    def chunks(self, replica: Replica) -> list[tuple[Request, int]]:
        """Prompts, or parts of them, that the next step takes."""
        limits, found = self.limits, []
        decoding = sum(one.decoding for one in replica.running)
        room = limits.budget - (0 if limits.prefill_first else decoding * limits.queries)
        started = [one for one in replica.running if not one.decoding]
        while room > 0:
            if not started and replica.waiting and self.may_enter(replica, replica.waiting[0]):
                started.append(replica.waiting.pop(0))
                replica.running += started
            if not started:
                break
            one = started.pop()
            taken = min(one.known - one.computed, room)
            room -= taken
            found.append((one, taken))
        return found

    def may_enter(self, replica: Replica, one: Request) -> bool:
        if not replica.running:
            return True
        held = sum(self.blocks(other) for other in replica.running)
        return len(replica.running) < self.limits.most and held + self.blocks(one) <= self.limits.blocks

    def blocks(self, one: Request) -> int:
        """With room for the first token of whoever is not decoding yet."""
        kept = one.prompt + one.output if self.limits.whole else one.known + (not one.decoding)
        return ceil(kept / self.block_tokens)

    def full(self, replica: Replica) -> bool:
        return self.limits.preempts and sum(self.blocks(one) for one in replica.running) > self.limits.blocks

    def throw_out(self, replica: Replica) -> None:
        """The latest to be let in, which is computed again from its beginning."""
        one = replica.running.pop()
        one.computed, one.decoding = 0, False
        replica.waiting.insert(0, one)
        self.preemptions += 1
