"""Paths as clients write them: with slashes to spare, and with the model in them, as Azure's clients do."""

import re
from urllib.parse import unquote

from crosstie_gateway.wire.request import Request

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
