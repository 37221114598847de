"""The one file of a release: data files in a zip archive, with an Ed25519 signature over its bytes.

Nothing in it is looked at before the signature holds, and nothing is unpacked but the names that a catalog has.
"""

import http.client
import io
import re
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from crosstie.catalog.reading import is_date
from crosstie.catalog.releases import Release
from crosstie.catalog.writing import in_words
from crosstie.core.errors import BadData, BadInput, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT = "crosstie catalog 1"
# More than that is no catalog: the file itself, and its contents.
MOST_BYTES, MOST_UNPACKED = 64 * 2**20, 256 * 2**20
# The public half of the key that Crosstie's own releases are signed with, once there is one: see CONTRIBUTING.md.
_SHIPPED_KEY = Path(__file__).parent / "data" / "release_key.pem"
NO_KEY = "no release key ships with this version: only files signed with a key that --key names are taken"
_MANIFEST = "release.json"
NAMES = re.compile(
    r"release\.json|(api_)?prices\.csv|acceptance\.csv|(connectors|costs|formats|libraries|power|signals)\.toml|calibration\.json"
    r"|measured/(results(-[a-z0-9-]+)?\.csv\.gz|[a-z0-9-]+-kernels\.csv\.gz|[a-z0-9-]+-probe\.json)"
    r"|(accelerators|models|stacks|efficiency|preflight/rules)/[a-z0-9][a-z0-9_.+-]*\.toml"
    r"|preflight/(effort|engines|recipes)\.toml|preflight/releases\.csv|preflight/architectures/[a-z0-9][a-z0-9_.+-]*\.csv"
)
_NEEDS = "signatures need the package cryptography"
_TIMEOUT_S = 30.0


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    content: bytes
    # "" in a file that nobody signed.
    signature: bytes = b""


def packed(folder: Path, release: Release, private_key: bytes | None) -> bytes:
    """The file of a release, of all catalog files in a folder; signed with an Ed25519 key in PEM, or by nobody."""
    _check_day(folder, release)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    unknown = [name for name in names if not NAMES.fullmatch(name) or name == _MANIFEST]
    if unknown or not names:
        raise BadInput(f"{folder}: {unknown[0] if unknown else 'nothing in it'} is no file of a release")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(_entry(_MANIFEST), msgspec.json.encode(release))
        for name in names:
            out.writestr(_entry(name), (folder / name).read_bytes())
    content = archive.getvalue()
    signature = _private(private_key).sign(content) if private_key else b""
    return msgspec.json.encode(_Envelope(format=FORMAT, content=content, signature=signature)) + b"\n"


def _entry(name: str) -> zipfile.ZipInfo:
    """Without times, so that the same files give the same bytes."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def opened(source: str, raw: bytes, keys: Sequence[Path], unsigned: bool) -> tuple[Release, dict[str, bytes], str]:
    """The release, its files, and the key that signed it. `keys`: public ones in PEM beside a shipped one."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except msgspec.MsgspecError as error:
        raise BadData(source, "", f"is no release of the catalog, or cut off: {error}") from None
    if envelope.format != FORMAT:
        raise BadData(source, "format", f"is '{envelope.format}'; this version reads '{FORMAT}'")
    key = "" if unsigned else _signer(source, envelope, keys)
    files = _unpacked(source, envelope.content)
    try:
        release = msgspec.json.decode(files.pop(_MANIFEST, b""), type=Release)
    except msgspec.MsgspecError as error:
        raise BadData(source, _MANIFEST, f"does not say which release it is: {error}") from None
    _check_day(source, release)
    return release, files, key


def _check_day(source: object, release: Release) -> None:
    if not is_date(release.release) or len(release.release) != 10:
        raise BadData(source, "release", f"'{release.release}' is no day: releases are named YYYY-MM-DD")


def _signer(source: str, envelope: _Envelope, keys: Sequence[Path]) -> str:
    if not envelope.signature:
        raise BadData(source, "", "is not signed; --unsigned takes it all the same")
    try:
        from cryptography.exceptions import InvalidSignature
    except ImportError:
        raise MissingExtra(f"--unsigned checks no signature; {_NEEDS}", "update") from None
    trusted = [*shipped_keys(), *keys]
    if not trusted:
        raise BadData(source, "signature", f"cannot be checked: {NO_KEY}")
    for file in trusted:
        key = _public(file)
        try:
            key.verify(envelope.signature, envelope.content)
        except InvalidSignature:
            continue
        return sha256(key.public_bytes_raw()).hexdigest()[:16]
    raise BadData(source, "signature", "does not hold: the file was changed, or signed with a key that is not known")


def shipped_keys() -> list[Path]:
    return [_SHIPPED_KEY] if _SHIPPED_KEY.is_file() else []


def _unpacked(source: str, content: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    room = MOST_UNPACKED
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                if not NAMES.fullmatch(entry.filename) or entry.filename in files:
                    raise BadData(source, entry.filename, "is no file of a release, or there twice")
                with archive.open(entry) as inner:
                    files[entry.filename] = inner.read(room + 1)
                room -= len(files[entry.filename])
                if room < 0:
                    raise BadData(source, entry.filename, f"unpacks to more than {MOST_UNPACKED // 2**20} MiB")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadData(source, "content", f"cannot be unpacked: {error}") from None
    return files


def _private(pem: bytes) -> Any:
    return _loaded("load_pem_private_key", "Ed25519PrivateKey", "the private key", pem, password=None)


def _public(file: Path) -> "Ed25519PublicKey":
    with in_words(f"{file}: cannot be read"):
        pem = file.read_bytes()
    key: Ed25519PublicKey = _loaded("load_pem_public_key", "Ed25519PublicKey", str(file), pem)
    return key


def _loaded(how: str, kind: str, what: str, pem: bytes, **more: Any) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra(_NEEDS, "update") from None
    try:
        key = getattr(serialization, how)(pem, **more)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, getattr(ed25519, kind)):
        raise BadInput(f"{what}: is no Ed25519 key in PEM")
    return key


def fetched(source: str) -> bytes:
    """The bytes of a file or an http(s) address, as far as a release may reach."""
    with in_words(f"{source}: cannot be read"):
        if "://" not in source:
            with Path(source).expanduser().open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        else:
            raw = _downloaded(source)
    if len(raw) > MOST_BYTES:
        raise BadInput(f"{source}: is more than {MOST_BYTES // 2**20} MiB, so no release of the catalog")
    return raw


class _SameKind(urllib.request.HTTPRedirectHandler):
    """Follows to http and https alone, and not from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        allowed = ("https://",) if req.full_url.startswith("https://") else ("https://", "http://")
        if not newurl.startswith(allowed):
            fp.close()
            raise BadInput(f"{req.full_url}: sends on to {newurl}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _downloaded(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"{url}: only files, http and https are read")
    try:
        opener = urllib.request.build_opener(_SameKind)
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            raw: bytes = answer.read(MOST_BYTES + 1)
            length = answer.headers.get("content-length", "")
    except urllib.error.HTTPError as error:
        error.close()
        raise BadInput(f"{url}: HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise BadInput(f"{url}: cannot be reached: {error.reason}") from None
    except (http.client.HTTPException, ValueError) as error:
        raise BadInput(f"{url}: cannot be read: {error}") from None
    # A limited read does not tell by itself that the rest is missing.
    if length.isdigit() and len(raw) < min(int(length), MOST_BYTES):
        raise BadInput(f"{url}: cut off after {len(raw):,} of {int(length):,} bytes")
    return raw


def files_of(files: Mapping[str, bytes]) -> list[str]:
    """What a release has, for people: each folder once, with how many files of it."""
    counts: dict[str, int] = {}
    for name in files:
        kind = name.rpartition("/")[0] or name
        counts[kind] = counts.get(kind, 0) + 1
    return [kind if "." in kind else f"{count} {kind}" for kind, count in counts.items()]
