"""A fleet's backends as the names under which recipes start engines, for resolvers to find."""

import msgspec

from crosstie.catalog.addresses import BY_NAME
from crosstie.core.fleet import HANDING, Fleet, Pool
from crosstie.port.recipe.recipe import PORT, hosted_port, hosted_service, numbered_host, service_name, side_service


def with_names(fleet: Fleet) -> Fleet:
    """The same with backends: names under which `crosstie recipe` starts engines, for resolvers to find. A pool's own
    stands for all of its replicas; engines that are asked one by one have one each."""
    return msgspec.structs.replace(fleet, pools=tuple(map(named, fleet.pools)))


def named(pool: Pool) -> Pool:
    apart, service = pool.apart, service_name(pool.name)
    if pool.accelerator is None or pool.token_price is not None:
        return pool
    if apart is not None and apart.connector in HANDING:
        sides = {
            role: msgspec.structs.replace(
                side, backends=_each(side_service(pool.name, role), side.replicas * pool.replicas, PORT)
            )
            for role, side in (("prefill", apart.prefill), ("decode", apart.decode))
        }
        return msgspec.structs.replace(pool, apart=msgspec.structs.replace(apart, **sides))
    if apart is not None or pool.loading in ("hook", "llamacpp-router"):
        return msgspec.structs.replace(pool, backends=_each(service, pool.replicas, PORT))
    if pool.hosts:
        hosts = tuple(
            msgspec.structs.replace(
                model, backends=_each(hosted_service(pool.name, number), pool.replicas, hosted_port(number))
            )
            for number, model in enumerate(pool.hosts)
        )
        return msgspec.structs.replace(pool, hosts=hosts)
    return msgspec.structs.replace(pool, backends=(f"{BY_NAME}http://{service}:{PORT}/v1",))


def _each(service: str, count: int, port: int) -> tuple[str, ...]:
    return tuple(f"http://{numbered_host(service, index)}:{port}/v1" for index in range(count))
