"""Forms that strings of files have: each takes what is written, and gives it back or says what is wrong with it."""

import re
import shlex
from ipaddress import ip_network
from urllib.parse import urlsplit

from crosstie.core.errors import BadInput

_POOL_NAME = re.compile(r"^[^\W_][\w.-]{0,99}$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
# Letters and digits in one run of this length are a key's, not a name's.
_KEY_RUN = 16
_RELEASE = re.compile(r"^b?\d[\w.+-]{0,39}$")
# As browsers send it: nothing after the port.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")
_HERE = ("127.0.0.1", "::1", "localhost")


def pool_name(given: str) -> str:
    if not _POOL_NAME.match(given) or given != given.lower():
        raise BadInput(f"'{given}' must be lower case: letters, digits, dots and dashes")
    return given


def model_name(given: str) -> str:
    if given != given.strip():
        raise BadInput(f"'{given}' begins or ends with a space, and names are compared exactly")
    return given


def engine_release(given: str) -> str:
    """Of an engine: 0.32.0, or llama.cpp's b6000."""
    if not _RELEASE.match(given):
        raise BadInput(f"'{given}' is no release of an engine, such as 0.32.0")
    return given


def variable_name(given: str) -> str:
    """Of the environment."""
    secret = any(len(run) >= _KEY_RUN and not run.isalpha() for run in given.split("_"))
    if secret or not _VARIABLE.match(given):
        # Not repeated: it may be a key.
        raise BadInput(
            "takes the name of an environment variable that holds the key, such as BACKEND_API_KEY, not the key"
        )
    return given


def command(given: str) -> str:
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise BadInput(f"is no command: {error}") from None
    if not words[0]:
        raise BadInput("is no command: its first word is empty")
    return given


def network(given: str) -> str:
    try:
        ip_network(given, strict=False)
    except ValueError:
        raise BadInput(f"'{given}' is no address and no network") from None
    return given


def origin(given: str) -> str:
    if given != "*" and not _ORIGIN.fullmatch(given):
        raise BadInput(f"'{given}' is neither '*' nor as https://example.com")
    return given


def https_url(given: str) -> str:
    try:
        parts = urlsplit(given)
        host = parts.hostname
    except ValueError:
        host = None
    if host is None or not (parts.scheme == "https" or (parts.scheme == "http" and host in _HERE)):
        raise BadInput("is no https address; http is for this machine alone")
    return given
