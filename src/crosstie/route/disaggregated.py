"""How fast a pool is whose replicas are disaggregated: prompts by the one side, tokens by the other."""

from collections.abc import Collection, Sequence
from math import inf

from crosstie.core.disaggregated import Disaggregated
from crosstie.core.fleet import Pool
from crosstie.perf.disaggregated import Sides, transfer
from crosstie.route.ask import Ask
from crosstie.route.live import LivePool, Replica
from crosstie.route.load import ReplicaLoad
from crosstie.route.modelled import ModelledSpeed
from crosstie.route.speed import Speed, View


def choose_prefill(
    side: LivePool, ask: Ask, now: float, block_tokens: float, exclude: Collection[str] = ()
) -> tuple[Replica, float] | None:
    """The prefill replica that would have computed the prompt first, by the tokens that wait there and those of its own
    that are not held; with how many are. Those in service first, then those full by their word, then the suspected."""
    found: tuple[Replica, float] | None = None
    least = (inf, inf, inf)
    for replica in side.replicas:
        if replica.draining or replica.key in exclude or not (replica.up or replica.suspected):
            continue
        replica.advance(now)
        waiting = replica.total(now, side.speed.typical_input)[4]
        cached = replica.cached_tokens(ask, block_tokens)
        trust = 2.0 if not replica.up else 1.0 if replica.busy_until > now else 0.0
        rank = (trust, waiting + ask.input_tokens - cached, replica.prompt_rate_at(now))
        if rank < least:
            found, least = (replica, cached), rank
    return found


class ApartSpeed(Speed):
    """A replica is a whole service, asked through its own proxy, and which of its engines a request meets is its
    affair; or, where the gateway leads the engines, it is one of those that decode, and all have the same prefill side.
    """

    def __init__(self, service: Disaggregated, pool: Pool, context: float, prompt: float):
        super().__init__()
        self.prefill = ModelledSpeed(service.prefill, pool, prompt, prompt)
        self.decode = ModelledSpeed(service.decode, pool, context, prompt)
        self.prefillers, self.decoders = float(service.prefill_replicas), float(service.decode_replicas)
        if pool.apart is not None and pool.apart.is_led:
            self.prefillers = self.decoders = 1.0
        # The prefill engines that the gateway leads to; none: the service has its own, behind its proxy.
        self.beside: Sequence[ReplicaLoad] = ()
        self.chunk = self.prefill.chunk
        self.per_attended = self.prefill.per_attended
        self.per_cached = self.decode.per_cached / self.decoders
        self.cache_tokens = self.decode.cache_tokens * self.decoders
        self.held_share = self.decode.held_share
        self.prefill_share = service.prefill.parallelism.gpus / service.gpus
        self.decode_share = service.decode.parallelism.gpus / service.gpus
        moved = transfer(Sides([service]), prompt)
        # Where prefill answers itself, the client does not wait for the transfer.
        answers = service.connector.first_token == "prefill"
        self.moved_s = 0.0 if answers else float(moved.start_s[0, 0] + moved.wire_s[0, 0])
        self.most = float(self.decode.most) * self.decoders

    def fill(self, view: View, load: ReplicaLoad, now: float) -> None:
        in_flight, _, held, _, queued = load.total(now, self.typical_input)
        if self.beside:
            # Prompts wait there, whoever decodes them, and the next goes where the fewest do.
            queued = min(one.waiting_tokens + one.elsewhere.waiting_tokens for one in self.beside)
        prefill, decode = self.prefill, self.decode
        full_s = (prefill.full if queued else prefill.full_alone)[0]
        view.steps(prefill.few[0], prefill.eighth[0], full_s, prefill.room[0])
        # Prompts are shared out over the prefill replicas, and over the attention replicas of each.
        view.ahead_tokens = queued / (self.prefillers * prefill.dp)
        more = int((in_flight + 1.0) / self.decoders) + 1
        step_s = decode.decode[more if more < decode.last else decode.last]
        view.step_s = step_s * decode.steps_per_token + held * self.per_cached
        view.stretch = 1.0
        turnover_s = self.typical_output * view.step_s
        view.cache(self.cache_tokens - held, held, turnover_s)
        before_s = prefill.request_s + self.moved_s + 0.5 * view.step_s
        if in_flight >= self.most:
            before_s += (in_flight + 1.0 - self.most) / self.most * turnover_s
        view.before_s = before_s

    def replica_s(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float = float("inf")
    ) -> float:
        """Of the whole service, by the GPUs of each side that it keeps busy."""
        # Of an answer that somebody else began only the rest is charged.
        prompt = new_tokens + cached_tokens > 0.0
        prefill_s = self.prefill.replica_s(new_tokens, cached_tokens, 0.0) if prompt else 0.0
        decode_s = self.decode.replica_s(0.0, new_tokens + cached_tokens, output_tokens, tpot_s)
        return prefill_s * self.prefill_share + decode_s * self.decode_share

    def empty_step_s(self) -> float:
        return self.decode.empty_step_s()

    def idle_s(self, input_tokens: float, output_tokens: float) -> float:
        return self.prefill.idle_s(input_tokens, 0.0) + self.moved_s + self.decode.idle_s(0.0, output_tokens)
