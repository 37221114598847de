"""A fleet: pools of equal replicas, which class of requests goes where, and what was promised to it.

`plan` writes it to a file, `serve` keeps to that file.
"""

from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from crosstie.core.deployment import Parallelism, known_kv_format
from crosstie.core.fact import BesideFile, FileKey, Flat, Form, KeyRule
from crosstie.core.forms import (
    command,
    engine_release,
    https_url,
    model_name,
    network,
    origin,
    pool_name,
    variable_name,
)
from crosstie.core.speculation import DEEPEST
from crosstie.core.workload import TIER_RULES, TIERS, Target

# What a file may say; outside of it, a slip of unit.
_Timeout = Annotated[float, msgspec.Meta(ge=0.01, le=86_400)]
_Pause = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_Interval = Annotated[float, msgspec.Meta(ge=0.05, le=3600)]
_Many = Annotated[int, msgspec.Meta(ge=0, le=10**6)]
_Gib = Annotated[float, msgspec.Meta(ge=1e-6, le=1e5)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_MeanTokens = Annotated[float, msgspec.Meta(ge=1, le=1e9)]
_Price = Annotated[float, msgspec.Meta(ge=0, le=1e5)]
_Spending = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
_Path = Annotated[str, BesideFile()]
_ModelName = Annotated[str, Form(model_name)]
_FLAT = Flat()
Modality = Literal["text", "image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)

Policy = Literal["cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "weighted", "prefix"]

# How a replica that hosts several models is told to change them: vLLM's sleep and wake, llama.cpp's router mode, or a
# command of the user's.
Loading = Literal["vllm-sleep", "llamacpp-router", "hook"]


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of the models that share a pool's replicas: loaded when asked for, put away when others need the room."""

    model: str
    served_as: _ModelName | None = None
    precision: str | None = None
    # Where the catalog does not know them, or knows them wrong: memory of its weights, and seconds to load it (load_s).
    weight_gib: _Gib | None = None
    # All that it takes of a replica while it is loaded, its cache included; None: weights and a small cache.
    memory_gib: _Gib | None = None
    load_s: _Pause | None = None
    max_context: _Tokens | None = None
    # Loaded at the start and never put away.
    pinned: bool = False
    # Where each replica of the pool serves this model, if that is an address of its own.
    backends: tuple[str, ...] = ()


# How a gateway has one engine compute a prompt and another decode it, by the connector between them: vLLM's
# `kv_transfer_params`, one after the other, or SGLang's bootstrap, both at once.
Handing = Literal["nixl", "bootstrap"]
HANDING: dict[str, Handing] = {
    "vllm-nixl": "nixl",
    "sglang-mooncake": "bootstrap",
    "sglang-nixl": "bootstrap",
    "sglang-mori": "bootstrap",
}
# SGLang's own (`--disaggregation-bootstrap-port`).
BOOTSTRAP_PORT = 8998


class PoolSide(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of one kind in a replica with prefill and decode apart."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=10**4)]
    parallelism: Annotated[Parallelism, _FLAT]
    # Where each engine answers, of all replicas of the pool together; empty: they have a proxy, which is asked.
    backends: tuple[str, ...] = ()
    # Of SGLang's prefill engines: where each meets those that decode.
    bootstrap_ports: Annotated[tuple[int, ...], FileKey("bootstrap_port")] = ()

    @property
    def gpus(self) -> int:
        return self.replicas * self.parallelism.gpus


class PoolApart(msgspec.Struct, frozen=True, kw_only=True):
    """Each replica of the pool is a service of both kinds: behind the engine's own proxy, which has its address, or of
    engines with addresses of their own, which the gateway leads from one to the other."""

    prefill: PoolSide
    decode: PoolSide
    connector: str

    @property
    def is_led(self) -> bool:
        """Whether the gateway asks the engines themselves."""
        return bool(self.prefill.backends)

    @property
    def arrangement(self) -> "PoolApart":
        """Without addresses."""
        bare = [msgspec.structs.replace(side, backends=(), bootstrap_ports=()) for side in (self.prefill, self.decode)]
        return msgspec.structs.replace(self, prefill=bare[0], decode=bare[1])


class BackendAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool's backends are reached, where their addresses do not say it all; keys of the pool in its file."""

    # Files: the authorities that their certificates are held to, in place of the system's; and the certificate that the
    # gateway shows, with its key.
    tls_ca: _Path | None = None
    tls_cert: _Path | None = None
    tls_key: _Path | None = None
    # The name in their certificates, where it is another than that of their addresses.
    tls_server_name: str | None = None
    # http://proxy:3128, with ${VARIABLE} for what is secret, or "environment"; None: they are reached directly.
    proxy: str | None = None
    # How often names that stand for all of their addresses are looked up.
    discover_every_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0


# Of the machine that the gateway runs on: only who may write the fleet file may name them.
REACH_FILES = ("tls_ca", "tls_cert", "tls_key")


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of a pool's model: what clients call it, and where its engines find it."""

    name: _ModelName
    path: str


class TokenPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider asks for, and how much of it may be bought."""

    usd_per_million_input: _Price
    usd_per_million_output: _Price
    # Of a prompt, what the provider has in its cache; None: the same.
    usd_per_million_cached_input: _Price | None = None
    # In any hour, and in any day; None: no limit.
    max_usd_per_hour: _Spending | None = None
    max_usd_per_day: _Spending | None = None


SIDE_KEYS = ("prefill", "decode", "connector")
HOST_KEYS = ("hosts", "host_memory_gib", "load_hook", "loading")
TOKEN_KEYS = TokenPrice.__struct_fields__
SPLIT = ("tp", "pp", "ep", "dp")
# What a provider's machines have, and nobody here knows or pays.
_OF_MACHINES = (
    "accelerator", "usd_per_gpu_hour", "paid_anyway", "sunk_usd_per_gpu_hour", "adapters", "weight",
    *TIERS, *SPLIT, *SIDE_KEYS, *HOST_KEYS,
)  # fmt: skip
_KV_KEYS = ("kv_events", "kv_replay", "kv_topic")


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas of one deployment; names are the catalog's.

    Without an accelerator nothing is known of its speed but what it delivers: any OpenAI-compatible server will do,
    with a model by any name. Fields stand in the order in which a file has them. A new one with a default is read,
    held to its limits, and written where it differs from that, without a word anywhere else.
    """

    # Which keys of its table go together.
    rules: ClassVar[tuple[KeyRule, ...]] = (
        KeyRule("excludes", _OF_MACHINES, TOKEN_KEYS, "has no meaning for a pool that is paid by the token"),
        KeyRule("demands", TOKEN_KEYS, ("api_key_env",),
                "the variable with the provider's key; a client's own is not passed on to it"),
        KeyRule("demands", TOKEN_KEYS, ("max_context",),
                "how long a request the provider takes, from which follows what one may cost"),
        KeyRule("demands", ("decode", "connector"), ("prefill",),
                "OTHER is there, and a decode side alone answers nobody"),
        KeyRule("demands", ("prefill", "connector"), ("decode",),
                "OTHER is there, and a prefill side alone answers nobody"),
        KeyRule("excludes", SPLIT, SIDE_KEYS, "belongs into prefill and decode"),
        KeyRule("excludes", HOST_KEYS, SIDE_KEYS, "goes with prefill and decode together only"),
        KeyRule("demands", SIDE_KEYS, ("accelerator",),
                "prefill and decode apart are known by what they run on; leave them out for a plain address"),
        KeyRule("needs", HOST_KEYS, ("hosts",), "goes with hosts = [{ model = ... }, ...], which are missing"),
        KeyRule("demands", ("hosts",), ("loading",),
                f"how its models are loaded and put away, one of {', '.join(get_args(Loading))}"),
        KeyRule("excludes", ("model", "served_as"), ("hosts",),
                "belongs into the entries of hosts, each of which is a model"),
        *TIER_RULES,
        KeyRule("excludes", tuple(TIERS), (*SIDE_KEYS, *HOST_KEYS),
                "is of one engine, with its own prefixes, and has no meaning beside OTHER"),
        KeyRule("needs", ("max_adapters",), ("adapters",), "goes with adapters, which are missing"),
        KeyRule("excludes", ("adapters",), (*SIDE_KEYS, *HOST_KEYS),
                "has no meaning beside OTHER: adapters are of one model's engines"),
        KeyRule("needs", ("text", "acceptance"), ("speculation",), "is about speculation, which the pool has not"),
        KeyRule("excludes", ("tokenizer", "chat_template", *_KV_KEYS), ("hosts",),
                "is about one model, and this pool hosts several"),
        KeyRule("excludes", _KV_KEYS, ("prefill",),
                "is about one engine's cache, and replicas of this pool have several"),
        KeyRule("needs", ("chat_template", "kv_events"), ("tokenizer",), "is of no use without tokenizer"),
        KeyRule("needs", ("kv_replay", "kv_topic"), ("kv_events",), "is of no use without kv_events"),
        KeyRule("needs", ("trial_class", "max_failed", "max_slower"), ("shadow", "canary"),
                "is about a trial: give shadow or canary"),
        KeyRule("excludes", ("shadow", "canary"), (*HOST_KEYS, "prefill"), "is about one model behind one address"),
        KeyRule("demands", ("tls_key",), ("tls_cert",), "tls_key is there, and is the key of a certificate"),
    )  # fmt: skip

    name: Annotated[str, Form(pool_name)]
    model: str
    accelerator: str | None
    parallelism: Annotated[Parallelism, _FLAT]
    # Prefill and decode apart; `parallelism` is then that of a decode engine.
    apart: Annotated[PoolApart | None, _FLAT] = None
    precision: str | None
    kv_format: Annotated[str, FileKey("kv"), Form(known_kv_format)]
    stack: str | None
    # The engine's release, and the variables and flags that it is started with, as far as somebody has said.
    release: Annotated[str, Form(engine_release)] | None = None
    # How its engines speculate, such as mtp:3; on which kind of text; and tokens a step that they keep, if measured.
    speculation: str | None = None
    text: str = "chat"
    acceptance: Annotated[float, msgspec.Meta(ge=1, le=1 + DEEPEST)] | None = None
    settings: tuple[str, ...] = ()
    replicas: int
    usd_per_gpu_hour: float
    # LoRA adapters that its engines load when they are asked for, and how many a replica may have at once (None: all).
    max_adapters: Annotated[int, msgspec.Meta(ge=1, le=10**4)] | None = None
    adapters: tuple[Adapter, ...] = ()
    # Whether its GPUs cost the same while they idle; if not, they are paid by use.
    paid_anyway: bool = True
    # Of the price, what was paid when it was bought: no request adds to it, so the router does not count it.
    sunk_usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    # Gets no requests until an administrator lets it in, as `crosstie parity --admit` does.
    drained: bool = False
    # On trial: the share of its model's requests (of one class; None: of any) that are copied to it and compared, and
    # the share that it is sent (None: as any pool), until so many of them fail, or take so many times as long.
    shadow: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    canary: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    trial_class: str | None = None
    max_failed: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    max_slower: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.5
    # Somebody else's, paid by the token: what the fleet has no room for goes there, see `route.overflow`.
    token_price: Annotated[TokenPrice | None, _FLAT] = None
    # Requests that a replica may have in flight and still keep what the pool promises.
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    # The longest request that a replica holds.
    max_context: _Tokens
    # The name by which the backends know the model, where it is another than the catalog's; clients may use both.
    served_as: _ModelName | None = None
    # The environment variable that holds the backends' own API key; without one, the client's is passed on.
    api_key_env: Annotated[str, Form(variable_name)] | None = None
    # Its part of the traffic under the `weighted` policy; None: in proportion to what it can carry.
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    # A round trip to its replicas, where they are far away: every first token comes so much later.
    network_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    reach: Annotated[BackendAccess, _FLAT] = BackendAccess()
    # Where engines keep the prefixes that the GPU drops: memory and drives of the host for each GPU, and what all
    # replicas share; rates at which each GPU loads from there, None: the catalog's.
    host_gib_per_gpu: Annotated[float, msgspec.Meta(ge=0, le=1e5)] = 0.0
    nvme_gib_per_gpu: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    remote_gib: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    host_gb_per_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e4)] | None = None
    nvme_gb_per_s: Annotated[float, msgspec.Meta(ge=0.01, le=1e4)] | None = None
    remote_gb_per_s: Annotated[float, msgspec.Meta(ge=0.01, le=1e4)] | None = None
    # Files of its model's tokenizer and chat template, with which prompts are counted exactly and cut as engines cut
    # them; None: they are estimated.
    tokenizer: _Path | None = None
    chat_template: _Path | None = None
    # Where replicas tell what their caches hold, and where what was missed of it is asked for: one address for all,
    # with {host} in it, or one a replica. The topic that they tell it under.
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()
    kv_topic: str = ""
    # What it accepts besides text, such as "image" and "audio"; None: nobody said, so anything is sent there.
    modalities: tuple[Modality, ...] | None = None
    # Several models on the same replicas; empty: only `model`. How they are changed, by which command, and how much of
    # a replica's memory they may take (None: what the accelerator has, less what engines keep).
    loading: Loading | None = None
    load_hook: Annotated[str, Form(command)] | None = None
    host_memory_gib: _Gib | None = None
    # Where its replicas answer, one OpenAI-compatible base URL each; empty until they are deployed.
    backends: tuple[str, ...] = ()
    hosts: tuple[HostedModel, ...] = ()

    @property
    def keeps_sessions(self) -> bool:
        """Whether its engines, SGLang's, were started so that they keep the caches of sessions that requests name."""
        return "--enable-session-radix-cache" in self.settings and self.apart is None

    @property
    def replica_gpus(self) -> int:
        return self.apart.prefill.gpus + self.apart.decode.gpus if self.apart else self.parallelism.gpus

    @property
    def gpus(self) -> int:
        return self.replicas * self.replica_gpus

    @property
    def led_backends(self) -> tuple[str, ...]:
        """Of the engines that compute prompts and of those that decode, where the gateway leads them."""
        return self.apart.prefill.backends + self.apart.decode.backends if self.apart else ()

    @property
    def layout(self) -> str:
        """A replica's: TP8, or prefill and decode of one that has them apart, 1xTP4:2xTP8."""
        if self.apart is None:
            return str(self.parallelism)
        sides = (self.apart.prefill, self.apart.decode)
        return ":".join(f"{side.replicas}x{side.parallelism}" for side in sides)

    def by_model(self) -> "tuple[Pool, ...]":
        """Itself; of one that hosts several models, a pool of the same name for each, on the same replicas.

        Where models share an address, they are told apart by a fragment, which is never sent. Of one whose prefill and
        decode engines the gateway leads, those that decode, each with its part of what a service may have in flight.
        """
        if self.apart is not None and self.apart.is_led:
            decode = self.apart.decode
            each = -(-self.max_in_flight // decode.replicas)
            return (msgspec.structs.replace(self, backends=decode.backends, max_in_flight=each),)
        if not self.hosts:
            return (self,)
        return tuple(
            msgspec.structs.replace(
                self,
                model=host.model,
                served_as=host.served_as,
                precision=host.precision or self.precision,
                max_context=host.max_context or self.max_context,
                backends=host.backends or tuple(f"{address}#{host.model}" for address in self.backends),
                hosts=(),
            )
            for host in self.hosts
        )


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a class with prompts up to `up_to_input` tokens: this share of them goes to that pool."""

    pool: str
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    up_to_input: _Tokens | None = None
    # Of the class's requests, those with such prompts; None: as many as of every other length that has routes.
    traffic: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    why: str = ""


class ServedClass(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    # Requests/s at the peak, and the mean lengths that the plan counted with.
    requests_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    input_tokens: _MeanTokens = 1.0
    output_tokens: _MeanTokens = 1.0
    ttft: Annotated[Target | None, FileKey("ttft_ms")] = None
    tpot: Annotated[Target | None, FileKey("tpot_ms")] = None
    routes: tuple[Route, ...] = ()


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateway treats clients and backends: its patience, its limits, and how often it looks."""

    connect_timeout_s: Annotated[float, msgspec.Meta(ge=0.01, le=600)] = 2.0
    # From the request sent to the first byte of the answer, between two pieces of it, and for all of it.
    first_byte_timeout_s: _Timeout = 120.0
    idle_timeout_s: _Timeout = 60.0
    total_timeout_s: Annotated[float, msgspec.Meta(ge=0.01, le=604_800)] = 3600.0
    # Further backends that are tried while the client has not been sent anything.
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    # How long an engine may take to load a LoRA adapter.
    adapter_load_s: _Timeout = 60.0
    # Whether a stream that a backend breaks off goes on at another, where the request allows it.
    resume: bool = True
    # How long a request may be held where no replica of its model serves yet, 0: not at all; how many may be; and how
    # long a first replica takes, until that is learnt.
    hold_s: _Pause = 0.0
    max_held: _Many = 256
    start_s: _Timeout = 300.0
    # How long a request may wait for room where no target says so, and how many may.
    queue_s: _Pause = 10.0
    max_queued: _Many = 1000
    health_every_s: _Interval = 2.0
    metrics_every_s: _Interval = 1.0
    # The share of a model's replicas that breakers and health checks leave in service: below it, those that they have
    # taken out are sent what the others have no room for, unless they are known to be dead. 0: never.
    panic_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    # Over how long a backend that has just come (back) is brought up to its full share.
    slow_start_s: _Pause = 10.0
    # How long `/ready` says after SIGTERM that it leaves before connections are refused, so that balancers take it out;
    # and how long requests in flight are then waited for.
    lame_duck_s: _Pause = 5.0
    drain_s: _Pause = 60.0
    max_body_mib: Annotated[float, msgspec.Meta(ge=0.001, le=65_536)] = 32.0
    # Of clients, in all and from one address; 0: as many as there are.
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 16_384
    max_connections_per_address: _Many = 0
    # Proxies whose word on where a request came from is believed: addresses and networks, such as "10.0.0.0/8".
    trusted_proxies: tuple[Annotated[str, Form(network)], ...] = ()
    # Pages of these origins may ask from a browser, such as "https://app.example.com"; "*": of any.
    cors_origins: tuple[Annotated[str, Form(origin)], ...] = ()
    # Of electricity, where the price of a GPU-hour does not include it: it is added to what a request costs.
    usd_per_kwh: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    # The class of requests that name none; None: the one of the model whose prompts are nearest in length.
    default_class: str | None = None
    # Whether routing may use, and tell, for one tenant which prompts another has sent; if not, each key has its own.
    share_prefixes: bool = False
    # Requests that a key may have open at once, where it has no limit of its own; 0: as many as it likes.
    max_open_per_key: _Many = 0
    # What a key may have under /v1/files and /v1/batches: files, the room that they take, and batches that have not
    # ended; how many requests a batch has; and how long files and ended batches are kept.
    max_files_per_key: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 1000
    max_file_gib_per_key: Annotated[float, msgspec.Meta(ge=0.0001, le=1e5)] = 2.0
    max_batches_per_key: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 100
    max_batch_lines: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 50_000
    batch_keep_days: Annotated[float, msgspec.Meta(ge=0.01, le=3650)] = 30.0
    # Responses that a key keeps, their size, and how long; and the size of all keys' together. The oldest go first.
    max_responses_per_key: Annotated[int, msgspec.Meta(ge=1, le=10**7)] = 10_000
    max_response_mib_per_key: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)] = 256.0
    max_responses_gib: Annotated[float, msgspec.Meta(ge=0.000001, le=1e5)] = 10.0
    response_keep_days: Annotated[float, msgspec.Meta(ge=0.000001, le=3650)] = 30.0

    @property
    def metrics_last_s(self) -> float:
        """How long what an engine's metrics said is believed: until they were looked at in vain for a while."""
        return max(5.0, 3.0 * self.metrics_every_s)


class SharedState(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a gateway, and what several share; a ${VARIABLE} in an address is still to be read."""

    # Whether requests need a key of the store.
    keys: bool = False
    # Keys and usage: a SQLite file, or postgresql://...; None: no usage is kept.
    store: str | None = None
    # Load and limits of gateways on several machines; None: this one is alone.
    redis: str | None = None


# What tokens may be signed with: those who verify a signature cannot make one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
ASYMMETRIC: tuple[Algorithm, ...] = get_args(Algorithm)


class JwtIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose signed tokens are taken beside keys, and what they say of who sends them."""

    issuer: Annotated[str, Form(https_url)]
    # Tokens must be meant for one of these.
    audience: tuple[str, ...]
    # Its public keys: an address or a file; None: what the issuer's own configuration names.
    jwks: str | None = None
    algorithms: tuple[Algorithm, ...] = ASYMMETRIC
    # How far clocks may differ.
    leeway_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0
    # The claim that says which team of the store a subject belongs to; what its values mean, if not the team's own
    # name; and the team of those whose tokens name none.
    team_claim: str | None = None
    teams: dict[str, str] = {}
    team: str | None = None
    # What a token's scope must have: to be let in at all, and to ask for explanations (None: no token may).
    scope: str | None = None
    explain_scope: str | None = None
    # How often its keys are asked for, and how often at most because a token names one that is not known.
    refresh_s: _Interval = 300.0
    refresh_unknown_s: _Interval = 10.0


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # The day of the plan, ISO.
    planned: str
    policy: Policy
    pools: tuple[Pool, ...]
    classes: tuple[ServedClass, ...]
    # Further names that clients may use, and the model that each means.
    aliases: dict[str, str] = {}
    # By model, the models that take its requests, in this order, while no backend of its own can.
    fallbacks: dict[str, tuple[str, ...]] = {}
    serving: Serving = Serving()
    state: SharedState = SharedState()
    jwt: JwtIdentity | None = None
    # Where models lie that no catalog has, by id.
    folders: dict[str, str] = {}

    @property
    def usd_per_hour(self) -> float:
        return sum(pool.gpus * pool.usd_per_gpu_hour for pool in self.pools)
