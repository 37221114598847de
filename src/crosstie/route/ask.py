"""What is known of a request before it is sent anywhere."""

from crosstie.route.held import PromptTokens
from crosstie.route.session import LiveSession


class Ask:
    """A plain class, since it is made and read at every request, and compiled with those who do."""

    def __init__(
        self,
        *,
        model: str,
        class_name: str | None,
        input_tokens: float,
        output_tokens: float,
        most_output: int | None = None,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        priority: int = 1,
        pin: str | None = None,
        modalities: frozenset[str] = frozenset(),
        prefix: tuple[int, ...] = (),
        session: str | None = None,
        prompt_bytes: int = 0,
        waited_s: float = 0.0,
        patience_s: float = 0.0,
        streams: bool = True,
        copies: int = 1,
        prompts: int = 1,
    ):
        # The pools' model id: names that clients use are resolved before.
        self.model = model
        # A class of the fleet file, if it belongs to one.
        self.class_name = class_name
        # Estimated, and expected.
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        # The client's own limit on output tokens.
        self.most_output = most_output
        # Targets, of the request itself or of its class.
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        # 0 low, 1 normal, 2 high.
        self.priority = priority
        # The one pool that it may go to.
        self.pin = pin
        # What it holds beyond text, such as "image".
        self.modalities = modalities
        # Hashes of growing prefixes of the prompt, one a block, shortest first; see `route.prefix`.
        self.prefix = prefix
        self.session = session
        # Length of the prompt as it came, from which the bytes of a token are learnt; 0: not known.
        self.prompt_bytes = prompt_bytes
        # How long it has waited at the gateway so far, and how long it may rather than slow others down: see
        # `route.cheapest`. With no patience it is sent at once if there is room, target or not.
        self.waited_s = waited_s
        self.patience_s = patience_s
        # Backends that it must not be sent to (again) when its turn comes.
        self.tried: tuple[str, ...] = ()
        # Whether the first token will be seen when it comes. Where it is not, it is assumed to come as predicted.
        self.streams = streams
        # Prompts that it has, whose tokens are all of `input_tokens`; and answers that are made of all of them.
        self.prompts = prompts
        self.copies = copies
        # The key that takes turns with others in the queue; 0 without keys.
        self.tenant = 0
        # Whether `input_tokens` were counted, not estimated; and the prompt's tokens, where they say what an engine
        # holds of it.
        self.counted = False
        self.tokens: PromptTokens | None = None
        # The tenant whose prompts alone may be used for it, and told of; 0: everybody's.
        self.cache_tenant = 0
        # The session that it goes on with; None: it is a new one's, or nobody has looked. How long the client
        # says that it pauses until its next turn: infinitely, where no other follows; None: it does not say.
        self.under_way: LiveSession | None = None
        self.pause_s: float | None = None
        # It is judged with no more margin than predictions need on a fleet that works.
        self.in_doubt = False
        # Its model was loaded nowhere when it came.
        self.cold = False
        # The LoRA adapter of its model that it asks for.
        self.adapter: str | None = None
