"""A repository of the Hugging Face hub, read without its weights: config.json, and the header of each shard.

huggingface_hub does the reading: headers by range requests; endpoint (HF_ENDPOINT), token and proxies as people have
set them for everything else.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from crosstie.catalog.config import with_modelopt
from crosstie.core.errors import BadData, BadInput, MissingExtra
from crosstie.port.checkpoint.headers import Header, header_of
from crosstie.port.checkpoint.index import INDEX, Checkpoint, compare

_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_DEFAULT = "https://huggingface.co"
_TIMEOUT_S = 15.0
_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")


class Repository(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    revision: str | None = None
    # Whether it was given as an address, so that nothing else can be meant.
    by_address: bool = False


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a repository."""

    config: dict[str, Any]
    # Without it, why there is none.
    checkpoint: Checkpoint | None
    reason: str = ""


def repository(asked: str) -> Repository | None:
    """org/name, org/name@revision, hf://org/name or an address of the hub; None where it is none of these."""
    if asked.startswith("hf://"):
        match = _ID.fullmatch(asked.removeprefix("hf://").removeprefix("models/"))
        return Repository(id=match["id"], revision=match["revision"], by_address=True) if match else None
    if asked.startswith(("http://", "https://")):
        address = urlsplit(asked)
        parts = [part for part in address.path.split("/") if part]
        if address.hostname not in (*_HOSTS, urlsplit(_endpoint()).hostname) or len(parts) < 2:
            raise BadInput(f"{asked}: not the address of a model on {_endpoint()}; write org/name")
        revision = parts[3] if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve") else None
        return Repository(id="/".join(parts[:2]), revision=revision, by_address=True)
    match = _ID.fullmatch(asked)
    return Repository(id=match["id"], revision=match["revision"]) if match else None


def read_repository(asked: Repository) -> Remote:
    """Its config, and the headers of its safetensors where there are any."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError
    except ImportError:
        said = f"{asked.id}: no such folder and no name of the catalog"
        raise MissingExtra(f"{said}; to read it from the hub", "hub") from None
    endpoint, folder = _endpoint(), Path(asked.id)
    with _told(asked, endpoint), _quietly():
        try:
            raw = _json(asked, endpoint, "config.json")
        except EntryNotFoundError:
            raise BadInput(
                f"{asked.id}: the repository has no config.json, so it is no model of transformers"
            ) from None
        if "quantization_config" not in raw:
            # ModelOpt writes its settings into a file of their own.
            with suppress(EntryNotFoundError):
                raw = with_modelopt(raw, _json(asked, endpoint, "hf_quant_config.json"))
        try:
            found = HfApi(endpoint=endpoint).get_safetensors_metadata(asked.id, revision=asked.revision)
        except NotASafetensorsRepoError:
            return Remote(config=raw, checkpoint=None, reason=f"no {INDEX} and no model.safetensors in {asked.id}")
    headers = {name: _header(folder / name, one) for name, one in sorted(found.files_metadata.items())}
    if found.sharded:
        compare(folder / INDEX, found.weight_map, headers)
    return Remote(config=raw, checkpoint=Checkpoint(folder, headers, None, is_remote=True))


def _json(asked: Repository, endpoint: str, name: str) -> dict[str, Any]:
    """A small file, asked for once: who is offline is told at once."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(asked.id, name, revision=asked.revision, endpoint=endpoint)
    answer = get_session().get(url, headers=build_hf_headers(), timeout=_TIMEOUT_S)
    hf_raise_for_status(answer)
    try:
        found = answer.json()
    except ValueError:
        raise BadData(f"{asked.id}/{name}", "", "not valid JSON") from None
    if not isinstance(found, dict):
        raise BadData(f"{asked.id}/{name}", "", "must hold one JSON object")
    return found


@contextmanager
def _quietly() -> Iterator[None]:
    """No bars and no warnings of the library: what goes wrong is told in the end."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, had_bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            enable_progress_bars()


def _header(file: Path, found: Any) -> Header:
    entries = {
        name: {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": list(one.data_offsets)}
        for name, one in found.tensors.items()
    }
    return header_of(file, entries, found.metadata)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT).rstrip("/")


@contextmanager
def _told(asked: Repository, endpoint: str) -> Iterator[None]:
    """What goes wrong on the way, in one line that says what to do."""
    from huggingface_hub import errors

    # Where no answer came, the HTTP library's own error is raised, the base of the hub's.
    transport: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    name, elsewhere = asked.id, "; offline, give the folder or the config.json of the model"
    said: Callable[[str], BadInput] = lambda reason: BadInput(f"{name}: {reason}")  # noqa: E731
    try:
        yield
    except errors.GatedRepoError:
        raise said(f"gated: accept its licence on {endpoint}/{name}, then `hf auth login` or HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise said(f"no revision '{asked.revision}' on {endpoint}") from None
    except errors.RepositoryNotFoundError:
        private = "if it is private, `hf auth login` or HF_TOKEN"
        raise said(f"no such folder, no name of the catalog, and no such model on {endpoint}; {private}") from None
    except errors.SafetensorsParsingError as error:
        raise BadData(name, "header", " ".join(str(error).split())[:200]) from None
    except errors.HFValidationError as error:
        raise said(" ".join(str(error).split())[:200]) from None
    except errors.LocalEntryNotFoundError as error:
        reason = error.__cause__ or error
        if isinstance(reason, errors.HfHubHTTPError) and reason.response is not None:
            raise said(_status(endpoint, reason.response.status_code)) from None
        raise said(f"{endpoint} cannot be reached ({type(reason).__name__}){elsewhere}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise said(_status(endpoint, status)) from None
    except (transport, OSError) as error:
        raise said(f"{endpoint} cannot be reached ({type(error).__name__}){elsewhere}") from None


def _status(endpoint: str, status: int | None) -> str:
    if status in (401, 403):
        return f"{endpoint} answers {status}: the token is not valid there or may not read this model; `hf auth login`"
    return f"{endpoint} answers {status}; try again later, or give the folder or the config.json of the model"
