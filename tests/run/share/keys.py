"""Keys of a gateway in a process, and what it answers to them."""

import http.client
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.run.emulate.running import SMALL
from tests.run.service.processes import Running, comes_true, command, environment


def made_key(folder: Path, name: str) -> str:
    """One with ten requests a minute."""
    arguments = command("keys", "create", name, "--rpm", "10", "--store", folder / "keys.db")
    made = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment(folder))
    return made.stdout.strip()


def known_to_all(gateways: list[Running], key: str) -> bool:
    """Workers look for new keys by themselves, and clients are shared out between them: of two, six in a row go to one
    of them once in 32 times."""
    return comes_true(
        lambda: all(_status(one, "GET", "/v1/models", None, key) == 200 for one in gateways for _ in range(24))
    )


def asked(running: Running, key: str) -> int:
    body = {"model": SMALL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return _status(running, "POST", "/v1/chat/completions", body, key)


def _status(running: Running, method: str, path: str, body: dict[str, Any] | None, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status
