"""LoRA adapters: which replica has which, and where a request goes that needs one.

An adapter shares the engine, the memory and the batch of its model, so a request for it is routed as one for the model:
among the replicas that have the adapter first, and to another, which loads it, where those have no room or would miss
the target. Loading itself is the gateway's; here is what is known of it.
"""

from collections.abc import Collection

from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import LiveFleet
from crosstie.route.policy import Around


class AdapterAffinity(Around):
    def choose(
        self, fleet: LiveFleet, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False,
        panic: bool = False,
    ) -> Decision:  # fmt: skip
        own, adapter = self.own, ask.adapter
        if adapter is None:
            return own.choose(fleet, ask, now, exclude=exclude, explain=explain, panic=panic)
        without, unable, busy = _sorted(fleet, ask, adapter, now)
        considered = own.choose(fleet, ask, now, exclude=exclude, explain=True).considered if explain else []
        having = own.choose(fleet, ask, now, exclude=(*exclude, *without), panic=panic)
        targets = ask.ttft_s is not None or ask.tpot_s is not None
        if having.outcome == "send" and (having.meets or not targets):
            decision = having
        else:
            decision = own.choose(fleet, ask, now, exclude=(*exclude, *unable), panic=panic)
            if decision.outcome != "send" and having.outcome == "refuse" and busy:
                decision = Decision("wait", f"no replica has a place for adapter {adapter}: those there are in use")
            elif decision.outcome == "refuse":
                decision = having
        if decision.replica is not None:
            there = decision.replica.key not in without
            decision.note = f"adapter {adapter} {'is' if there else 'has to be'} loaded there"
        # As if every replica of the pools that have it had it loaded.
        missing = f"adapter: does not have {adapter}"
        decision.considered = [
            one if one.pool in fleet.adapters[adapter] or one.prediction is None else one._replace(dropped=missing)
            for one in considered
        ]
        return decision


def _sorted(fleet: LiveFleet, ask: Ask, adapter: str, now: float) -> tuple[list[str], list[str], bool]:
    """Replicas of its model that do not have the adapter; of these, those that cannot load it now; and whether one
    cannot only because all its places are in use."""
    without, unable, busy = [], [], False
    for pool in fleet.by_model.get(ask.model, ()):
        listed = pool.name in fleet.adapters[adapter]
        for replica in pool.replicas:
            slots = replica.adapters
            if slots is None or not listed:
                without.append(replica.key)
                unable.append(replica.key)
            elif not slots.ready(adapter):
                without.append(replica.key)
                if not slots.may_take(adapter, now):
                    unable.append(replica.key)
                    busy = busy or (replica.up and not slots.refuses(adapter, now))
    return without, unable, busy
