"""A repository of the hub, read from a local server that answers as the hub does: headers alone, never the weights."""

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.conftest import Command
from tests.needs import one_in
from tests.port.preflight import tiny

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.port.checkpoint.hub import Repository, repository
from crosstie.port.preflight.stored import read_stored

constants = pytest.importorskip("huggingface_hub.constants")
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Hub:
    """Files of org/name under /org/name/resolve/REVISION/FILE, with the headers that huggingface_hub asks for."""

    def __init__(self, folder: Path):
        self.folder = folder
        # What was sent of each file.
        self.sent: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def log_message(self, *_: object) -> None:
                """Nothing: tests are quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        match = re.fullmatch(r"/([\w.-]+)/([\w.-]+)/resolve/([\w.-]+)/(.+)", request.path.partition("?")[0])
        if match is None or match[1] == "nobody":
            return self._refuse(request, 404, "RepoNotFound")
        if match[1] == "gated":
            return self._refuse(request, 403, "GatedRepo")
        if match[1] == "broken":
            return self._refuse(request, 500, "")
        file = self.folder / match[2] / match[4]
        if match[3] not in ("main", _COMMIT):
            return self._refuse(request, 404, "RevisionNotFound")
        if not file.is_file():
            return self._refuse(request, 404, "EntryNotFound")
        body, status = file.read_bytes(), 200
        asked = _RANGE.fullmatch(request.headers.get("Range", ""))
        if asked:
            body, status = body[int(asked[1]) : int(asked[2]) + 1], 206
        request.send_response(status)
        for name, value in {
            "X-Repo-Commit": _COMMIT, "ETag": f'"{file.name}"', "Content-Length": str(len(body)), "Accept-Ranges": "bytes",
        }.items():  # fmt: skip
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            # Before it goes out: whoever has got it looks here at once.
            self.sent[file.name] = self.sent.get(file.name, 0) + len(body)
            request.wfile.write(body)
        return None

    @staticmethod
    def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        if code:
            request.send_header("X-Error-Code", code)
            request.send_header("X-Error-Message", "no")
        request.send_header("Content-Length", "0")
        request.end_headers()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub(tmp_path / "repositories")
    thread = Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.mark.parametrize("model", one_in(3, ["fp8-block", "bf16", "gpt-oss"]))
def test_a_repository_is_judged_as_its_folder_would_be(crosstie: Command, hub: Hub, model: str) -> None:
    folder = tiny.write(hub.folder / "tiny", model)
    by_folder, by_name = (
        json.loads(crosstie("preflight", asked, "--on", "mi300x,h200", "--scan", "none", "--json").out)
        for asked in (str(folder), "org/tiny")
    )
    assert by_name["verdicts"] == by_folder["verdicts"]
    assert any("read on the hub" in one["what"] for one in by_name["findings"])
    assert {one["where"]["file"] for one in by_name["findings"]} == {"org/tiny/config.json"}


def test_weights_are_not_downloaded(catalog: Catalog, hub: Hub) -> None:
    folder = tiny.write(hub.folder / "tiny", "bf16")
    stored = read_stored(catalog, f"{hub.address}/org/tiny/tree/main")
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    assert stored.checkpoint
    assert len(stored.checkpoint.headers) == len(sizes) == 2
    # huggingface_hub asks for the first 100 kB of a shard, where most headers end.
    assert all(hub.sent[name] <= 100_001 < size for name, size in sizes.items())


def test_a_broken_repository_is_found_before_the_download(crosstie: Command, hub: Hub) -> None:
    tiny.write(hub.folder / "tiny", "bf16", num_key_value_heads=4)
    told = crosstie("preflight", "org/tiny", "--on", "h200")
    assert told.status == 1
    assert "k_proj.weight" in told.out


def test_a_repository_without_safetensors_is_its_config(crosstie: Command, hub: Hub) -> None:
    folder = tiny.write(hub.folder / "tiny", "bf16")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    told = crosstie("preflight", "org/tiny", "--on", "h200", "--json")
    assert json.loads(told.out)["verdicts"] == {"h200": "ready"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("nobody/tiny", "no such model on http://127.0.0.1"),
        ("gated/tiny", "gated: accept its licence"),
        ("broken/tiny", "answers 500"),
        ("org/tiny@v9", "no revision 'v9'"),
        ("org/empty", "no config.json"),
        ("https://example.com/org/tiny", "not the address of a model"),
        ("hf://org", "hf://org"),
    ],
)
def test_what_the_hub_refuses_is_one_line(crosstie: Command, hub: Hub, asked: str, said: str) -> None:
    tiny.write(hub.folder / "tiny", "bf16")
    (hub.folder / "empty").mkdir()
    told = crosstie("preflight", asked, "--on", "h200")
    assert (told.status, said in told.err) == (2, True), told.err
    assert len(told.err.strip().splitlines()) == 1


def test_a_hub_that_does_not_answer_is_one_line(crosstie: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bound, and nobody listens: connections are refused at once.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        told = crosstie("preflight", "org/tiny", "--on", "h200")
        assert told.status == 2
        assert "cannot be reached" in told.err
        assert len(told.err.strip().splitlines()) == 1


def test_without_the_library_it_says_what_to_install(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    told = crosstie("preflight", "org/tiny", "--on", "h200")
    assert told.status == 2
    assert "pip install '.[hub]'" in told.err


def test_a_name_of_the_catalog_and_a_folder_come_before_the_hub(
    catalog: Catalog, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_stored(catalog, "deepseek-ai/DeepSeek-R1").checkpoint is None
    tiny.write(tmp_path / "org/tiny", "bf16")
    monkeypatch.chdir(tmp_path)
    stored = read_stored(catalog, "org/tiny")
    assert stored.checkpoint
    assert not stored.checkpoint.is_remote
    assert hub.sent == {}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("org/name", Repository(id="org/name")),
        ("org/name@abc", Repository(id="org/name", revision="abc")),
        ("hf://org/name", Repository(id="org/name", by_address=True)),
        ("https://huggingface.co/org/name", Repository(id="org/name", by_address=True)),
        ("https://huggingface.co/org/name/tree/v1", Repository(id="org/name", revision="v1", by_address=True)),
        ("llama-3.1-8b", None),
        ("a/b/c", None),
    ],
)
def test_what_is_a_repository(asked: str, found: Repository | None) -> None:
    assert repository(asked) == found


def test_an_address_elsewhere_is_refused() -> None:
    with pytest.raises(BadInput, match="not the address of a model"):
        repository("https://example.com/org/name")
