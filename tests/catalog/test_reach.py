"""How a pool's backends are reached, as its fleet file says it."""

from pathlib import Path

import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.core.fleet import BackendAccess, Fleet

CATALOG = Catalog([])


def read(folder: Path, *lines: str, backends: str = '["https://a:8000/v1"]') -> Fleet:
    file = folder / "fleet.toml"
    text = ["format = 1", "[[pool]]", 'name = "a"', 'model = "m"', f"backends = {backends}", *lines]
    file.write_text("\n".join(text) + "\n")
    return read_fleet(CATALOG, file)


def test_files_are_named_from_where_the_fleet_file_lies_and_written_back(tmp_path: Path) -> None:
    lines = ('tls_ca = "ca.pem"', 'tls_cert = "/etc/gateway.pem"', 'tls_key = "keys/gateway.key"')
    fleet = read(tmp_path, *lines, 'tls_server_name = "vllm.internal"')
    assert fleet.pools[0].reach == BackendAccess(
        tls_ca=str(tmp_path / "ca.pem"),
        tls_cert="/etc/gateway.pem",
        tls_key=str(tmp_path / "keys" / "gateway.key"),
        tls_server_name="vllm.internal",
    )
    copy = tmp_path / "elsewhere" / "fleet.toml"
    copy.parent.mkdir()
    copy.write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, copy).pools == fleet.pools


def test_a_name_may_stand_for_any_number_of_replicas(tmp_path: Path) -> None:
    backends = '["DNS+HTTP://VLLM.default.svc:8000/v1/", "http://10.0.0.9:8000/v1"]'
    fleet = read(tmp_path, "replicas = 7", "discover_every_s = 5", backends=backends)
    (pool,) = fleet.pools
    assert pool.backends == ("dns+http://vllm.default.svc:8000/v1", "http://10.0.0.9:8000/v1")
    assert pool.replicas == 7
    assert pool.reach.discover_every_s == 5.0
    copy = tmp_path / "copy.toml"
    copy.write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, copy).pools == fleet.pools


@pytest.mark.parametrize(
    "proxy", ["http://proxy:3128", "http://me:${PASSWORD}@proxy:3128", "http://${USER_AND_PASSWORD}@proxy:3128",
              "${PROXY}", "environment", "http://[fd00::1]:3128"],
)  # fmt: skip
def test_proxies_are_written_as_they_were_read(proxy: str, tmp_path: Path) -> None:
    fleet = read(tmp_path, f'proxy = "{proxy}"')
    assert fleet.pools[0].reach.proxy == proxy
    copy = tmp_path / "copy.toml"
    copy.write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, copy).pools == fleet.pools


@pytest.mark.parametrize(
    ("lines", "backends", "said"),
    [
        (['tls_key = "a.key"'], '["https://a/v1"]', r"pool\[0\].tls_cert: missing: tls_key is there"),
        (['tls_ca = "a.pem"'], '["http://a/v1"]', r"pool\[0\].tls_ca: has no meaning: no backend of the pool is https"),
        (["discover_every_s = 5"], '["http://a/v1"]', r"pool\[0\].discover_every_s: has no meaning: no backend"),
        (["discover_every_s = 0"], '["dns+http://a/v1"]', r"pool\[0\].discover_every_s: 0 must be a number from 1 to"),
        ([], '["dns+http://10.0.0.1/v1"]', r"pool\[0\].backends\[0\]: .* is an address already"),
        ([], '["dns+ftp://a/v1"]', r"pool\[0\].backends\[0\]: 'ftp://a/v1' is no http or https address"),
        (
            ['proxy = "http://me:secret@proxy:3128"'],
            '["http://a/v1"]',
            r"pool\[0\].proxy: has a password in it: (?!.*secret)",
        ),
        (
            ['proxy = "socks5://proxy:1080"'],
            '["http://a/v1"]',
            r"pool\[0\].proxy: is no proxy such as http://proxy:3128",
        ),
        (['proxy = "http://proxy"'], '["http://a/v1"]', r"pool\[0\].proxy: is no proxy such as http://proxy:3128"),
        (['proxy = "http://proxy:3128"'], '["dns+http://a/v1"]', r"pool\[0\].proxy: does not go with dns\+"),
        ([], '["unix:run/vllm.sock"]', r"pool\[0\].backends\[0\]: 'run/vllm.sock' is no whole path of a socket"),
        ([], '["unix:/run/vllm.sock?x=1"]', r"pool\[0\].backends\[0\]: .* is no whole path of a socket"),
        ([], f'["unix:/{"a" * 107}"]', r"pool\[0\].backends\[0\]: the path of a socket has at most 107 bytes"),
        ([], '["unix:/run/a.sock", "unix:///run/a.sock"]', r"pool\[0\].backends\[1\]: unix:/run/a.sock is pool"),
        (['tls_ca = "a.pem"'], '["unix:/run/a.sock"]', r"pool\[0\].tls_ca: has no meaning"),
        (['proxy = "http://proxy:3128"'], '["unix:/run/a.sock"]', r"pool\[0\].proxy: does not go with unix:"),
        (["tls_ca = 3"], '["https://a/v1"]', r"pool\[0\].tls_ca: must be a non-empty string"),
        (['tls_cafile = "a.pem"'], '["https://a/v1"]', r"pool\[0\].tls_cafile: unknown key"),
    ],
)
def test_slips_are_refused_with_file_and_key(lines: list[str], backends: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=rf"fleet\.toml: {said}"):
        read(tmp_path, *lines, backends=backends)
