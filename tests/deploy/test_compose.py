"""The tour's compose file, by its shape: what it mounts is there, what it runs takes its options, and names and ports of
one service are those that the others ask for. Nobody has started it here: there is no container engine."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from tests.conftest import Command

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
# https://github.com/compose-spec/compose-spec/blob/main/05-services.md
KEYS = {
    "image", "build", "volumes", "entrypoint", "command", "environment", "ports", "depends_on", "healthcheck",
    "restart",
}  # fmt: skip


def _loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_every_service_is_one_that_compose_takes_and_mounts_what_is_there() -> None:
    for name, service in SERVICES.items():
        assert set(service) <= KEYS, name
        for mount in service.get("volumes", []):
            here, there, how = mount.split(":")
            assert (FOLDER / here).is_file(), mount
            assert there.startswith("/")
            assert how == "ro"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "its keys are known to everybody"
        for other in service.get("depends_on", []):
            assert other in SERVICES
        if "build" in service:
            root = (FOLDER / service["build"]["context"]).resolve()
            assert (root / service["build"]["dockerfile"]).is_file()


def test_the_fleet_is_that_of_the_emulated_replicas_and_the_gateway_takes_it(crosstie: Command) -> None:
    fleet = read_fleet(Catalog(), FOLDER / "fleet.toml")
    entry = SERVICES["replicas"]["entrypoint"]
    first = int(entry[entry.index("--port") + 1])
    backends = [urlsplit(url) for pool in fleet.pools for url in pool.backends]
    assert [(at.hostname, at.port) for at in backends] == [("replicas", first + n) for n in range(len(backends))]
    # The last one answers when all do.
    assert f"127.0.0.1:{backends[-1].port}/health" in SERVICES["replicas"]["healthcheck"]["test"][-1]
    dry = crosstie("serve", str(FOLDER / "fleet.toml"), *SERVICES["gateway"]["command"], "--dry-run")
    assert dry.status == 0, dry.err
    sent = SERVICES["traffic"]["entrypoint"]
    assert urlsplit(sent[sent.index("--url") + 1]).hostname in SERVICES
    assert sent[sent.index("--model") + 1] in {pool.model for pool in fleet.pools}
    for key in SERVICES["gateway"]["environment"].values():
        assert len(key) >= 16


def test_prometheus_asks_the_gateway_and_grafana_prometheus() -> None:
    (job,) = _loaded("prometheus.yml")["scrape_configs"]
    # The name that alerts ask for.
    assert job["job_name"] == "crosstie"
    assert [target for one in job["static_configs"] for target in one["targets"]] == ["gateway:8080"]
    mounted = {mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]}
    assert set(_loaded("prometheus.yml")["rule_files"]) <= mounted
    (source,) = _loaded("grafana/datasources.yml")["datasources"]
    asked = urlsplit(source["url"])
    assert (asked.hostname, source["type"]) == ("prometheus", "prometheus")
    assert any(port.endswith(f":{asked.port}") for port in SERVICES["prometheus"]["ports"])
    (provider,) = _loaded("grafana/dashboards.yml")["providers"]
    shown = [mount.split(":") for mount in SERVICES["grafana"]["volumes"] if mount.split(":")[1].endswith(".json")]
    for here, there, _ in shown:
        assert Path(there).parent == Path(provider["options"]["path"])
        assert json.loads((FOLDER / here).read_text())["uid"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in {row[1] for row in shown}
