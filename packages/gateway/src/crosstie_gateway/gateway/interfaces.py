"""What the gateway asks of the service around it: who loads models, other workers, tokens, traces, batches.

Each is None where there is none. The service derives from these, so they are not compiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from crosstie.route.ask import Ask
from crosstie.route.held import PromptTokens
from crosstie.route.live import Replica
from crosstie.route.load import EngineLoad
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply


class HostedModels(Protocol):
    """Loads and unloads the models of shared pools."""

    def asked(self, ask: Ask) -> tuple[str, float] | None:
        """A request is about to be decided on: why, where its model cannot be there in time, and when to ask again."""

    def absent(self, model: str) -> tuple[str, float] | None:
        """Why a hosted model is loaded nowhere, and after how many seconds to ask again; None where it is loaded."""

    def doubted(self, replica: Replica, *, surely: bool = False) -> None:
        """Something went wrong on it, so that it may have lost its model; `surely`: its engine has said so."""


class OtherWorkers(Protocol):
    """The other workers of this gateway on its machine; see `service.worker`."""

    def changed(self, backend: Backend) -> None:
        """This worker has found a backend up or down."""

    def probed(self, backend: Backend, fault: str | None, *, refused: bool) -> None:
        """It has asked after a backend's health; None: it is well."""

    def takes_probe(self, backend: Backend) -> bool:
        """Whether this worker is the one to ask after its health now: nobody has lately, or is about to."""

    def reported(self, backend: Backend, load: EngineLoad) -> None:
        """It has read a backend's metrics."""

    def takes_load(self, backend: Backend) -> bool:
        """Whether this worker is the one to read its metrics now; what another has read is this worker's as well."""

    def metrics_to(self, send: Callable[[str], None]) -> None:
        """Sends the page of all workers, once they have told theirs."""


class TracedRequest(Protocol):
    """One request, as it goes on. Its end is told to the gateway's listeners, with `RequestRecord.trace`."""

    # Of the trace: 32 digits.
    id: str = ""

    def attempt(self, pool: str, backend: str) -> bytes:
        """It is sent to a backend: the header lines that tell the backend so."""

    def first_token(self) -> None:
        """The answer has begun, in its present attempt."""

    def failed(self, why: str, status: int) -> None:
        """Its present attempt has come to nothing."""


class CountedPrompt(NamedTuple):
    """The tokens of a prompt, and whether they alone say which blocks of an engine's cache are its own."""

    tokens: PromptTokens
    is_plain: bool


class Tokenizing(Protocol):
    """Reads prompts as engines do; see `service.tokenizing`."""

    def read(self, request: Request, reply: Reply, go_on: Callable[[CountedPrompt | None], None]) -> None:
        """Calls `go_on` with the prompt, at once or later; with None where it cannot be counted in time. What fails in
        it later is answered here."""


class PluginQuestion(NamedTuple):
    """What plugins are told of a request, and the pools of its model that could serve it."""

    path: str
    model: str
    class_name: str
    key_id: int
    body: bytes
    pools: list[dict[str, Any]]


class PluginVerdict(NamedTuple):
    """`refusal`: for its client; `failed`: no answer. `body`: in place of its own; `pools`: the only ones that may have
    it; None: unchanged."""

    refusal: str = ""
    failed: bool = False
    body: bytes | None = None
    pools: tuple[str, ...] | None = None


Told = Callable[[PluginVerdict], None]


class Plugins(Protocol):
    """Guards, filters and policies of other packages; see `service.plugins`."""

    # Whether any of them chooses among pools.
    wants_pools: bool = False

    def consult(self, question: PluginQuestion, on_verdict: Told) -> None:
        """Calls `on_verdict` once, and soon."""


class Steering(NamedTuple):
    """Backends that a request is never sent to, and those that it is sent to only if no other has room."""

    never: tuple[str, ...]
    first: tuple[str, ...]


class TrialPools(Protocol):
    """Pools on trial, which get a share of their model's requests; see `service.trials`."""

    def steer(self, ask: Ask) -> Steering:
        """Called once for each request, before it is decided on."""


class Batches(Protocol):
    """Files and batches; see `crosstie_gateway.batch`."""

    def handle(self, request: Request, reply: Reply) -> None:
        """A request under /v1/files or /v1/batches."""


class OwnPages(Protocol):
    """What operators look at beside the API; see `service.dashboard`."""

    paths: frozenset[str] = frozenset()

    def opens(self, request: Request) -> None:
        """A request to one of its paths has a body that is still to come. Raises BadRequest."""

    def handle(self, request: Request, reply: Reply) -> None:
        """A request to one of its paths."""


class Tracing(Protocol):
    def begin(self, path: str, given: bytes) -> TracedRequest:
        """A request has come; `given` are its own valid lines of trace context, if it has any."""
