"""Which paths lead to backends. All take POST and name a model.

A list, since engines have other paths that change weights, caches and adapters: not for clients.
"""

import re
from urllib.parse import unquote

from crosstie_gateway.wire.request import Request

MESSAGES = "/v1/messages"
# Those whose answers the gateway knows: tokens, choices, streams that can be resumed.
KNOWN = frozenset(
    (*(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")), MESSAGES)
)
# Paths of which only the model is read: sounds, pictures, scores. An engine without such a path is not at fault.
PASSED = frozenset(
    (
        "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/moderations", "/v1/audio/speech",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations", "/v1/images/edits",
        "/v1/images/variations", "/tokenize", "/detokenize", "/pooling", "/classify",
    )
)  # fmt: skip
SERVED = KNOWN | PASSED
# Those that make pictures.
PICTURES = frozenset(f"/v1/images/{name}" for name in ("generations", "edits", "variations"))
# Those whose answers are no text: nothing of them is counted as tokens.
WORDLESS = (PASSED | {"/v1/embeddings"}) - {"/v1/audio/transcriptions", "/v1/audio/translations"}
# Those that come as forms with files in them, and are never read as JSON.
FORMS = frozenset(
    (
        "/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations",
    )
)  # fmt: skip
# Clients put slashes to spare; Azure's put the model there.
_SLASHES = re.compile("//+")
_AZURE = "/openai"
_DEPLOYMENTS = "/openai/deployments/"


def tidy_path(request: Request) -> str:
    """The API's own path for it, which the request has from now on."""
    path = _SLASHES.sub("/", request.path).rstrip("/") or "/"
    name, _, rest = path.removeprefix(_DEPLOYMENTS).partition("/") if path.startswith(_DEPLOYMENTS) else ("", "", "")
    if name and rest:
        request.model, path = unquote(name), f"/v1/{rest}"
    elif path.startswith(f"{_AZURE}/v1/"):
        path = path.removeprefix(_AZURE)
    else:
        request.path = path
        return path
    # Azure's own, of which no engine knows.
    request.query = "&".join(
        parameter for parameter in request.query.split("&") if not parameter.startswith("api-version=")
    )
    request.path = path
    return path
