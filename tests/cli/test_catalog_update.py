"""`crosstie catalog update`: what is taken, what is refused, and that nothing of the refused stays behind."""

import gzip
import io
import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tests.conftest import Command, status_of
from tests.prove.calibration.test_calibrate import results
from tests.small_workload import small

from crosstie.catalog import release_file
from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import COLUMNS
from crosstie.catalog.releases import VARIABLE, Release
from crosstie.cli import catalog_update
from crosstie.prove.calibration import calibrate as learning

ROOT = Path(__file__).parents[2]
HEAD = ",".join(COLUMNS) + "\n"
# Twice what sellers ask in the shipped data, and more: then an H200 is the cheaper one.
DEAR = HEAD + "mi300x,shop,on-demand,9.5,USD/h,claimed,2026-11-30,shop.example,\n"
Pack = Callable[..., Path]


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder of the user's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("CROSSTIE_RELEASE", raising=False)
    # Whether or not the package has a key of its own by now.
    monkeypatch.setattr(release_file, "_SHIPPED_KEY", tmp_path / "no-key.pem")
    return tmp_path / "data" / "crosstie" / "catalog"


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def public(tmp_path: Path, key: Ed25519PrivateKey) -> Path:
    file = tmp_path / "public.pem"
    file.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return file


@pytest.fixture
def pack(tmp_path: Path, key: Ed25519PrivateKey) -> Pack:
    """The file of a release with these contents, signed unless told otherwise."""

    def made(release: str = "2031-01-01", *, signed: bool = True, **files: str) -> Path:
        folder = tmp_path / f"files-{release}"
        for name, text in (files or {"prices.csv": DEAR}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        target = tmp_path / f"{release}.json"
        target.write_bytes(release_file.packed(folder, Release(release=release), pem if signed else None))
        return target

    return made


@pytest.fixture
def without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about what a release flips: two plans before it is in force take seconds."""
    monkeypatch.setattr(catalog_update, "_replanned", lambda workloads, draft: [])


@pytest.fixture
def known_good(monkeypatch: pytest.MonkeyPatch, without_plans: None) -> None:
    """For tests of what becomes of a release that is taken: reading the whole catalog once more takes a second."""
    monkeypatch.setattr(catalog_update, "_check", lambda source, draft: None)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For releases of nothing that a process keeps once it was read, as it does preflight's rules."""

    def here(arguments: list[str], release: Path | None) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as changed, redirect_stdout(out), redirect_stderr(err):
            if release:
                changed.setenv(VARIABLE, str(release))
            status = status_of(arguments, changed)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    monkeypatch.setattr(catalog_update, "_crosstie", here)


def refused(crosstie: Command, data_home: Path, *arguments: str) -> str:
    got = crosstie("catalog", "update", *arguments)
    assert (got.status, got.out) == (2, "")
    assert got.err.startswith("crosstie: ")
    assert got.err.count("\n") == 1
    # Nothing is half-written.
    assert [file for file in data_home.rglob("*") if not file.is_dir()] == []
    assert list(data_home.glob("draft-*")) == []
    return got.err


@pytest.mark.slow
def test_an_update_is_in_force_says_what_it_flips_and_is_reverted(
    crosstie: Command, pack: Pack, public: Path, tmp_path: Path
) -> None:
    file, question = pack(), small(tmp_path)
    before = json.loads(crosstie("plan", str(question), "--quick", "--json").out)["fleet"]["gpus"]
    got = crosstie("catalog", "update", str(file), "--key", str(public), "--plan", str(question))
    assert got.status == 0, got.err
    assert "Release 2031-01-01 is in force (signed by key " in got.out
    row = next(line for line in got.out.splitlines() if line.startswith("small"))
    assert row.split()[1:6] == ["FLIPS", "1", "mi300x", "1", "h200"]
    assert before == {"mi300x": 1}
    assert json.loads(crosstie("plan", str(question), "--quick", "--json").out)["fleet"]["gpus"] == {"h200": 1}
    assert "mi300x" in {p.accelerator for p in Catalog().prices if p.amount.source == "shop.example"}
    told = json.loads(crosstie("catalog", "status", "--json").out)
    assert (told["in_force"], [one["release"] for one in told["installed"]]) == ("2031-01-01", ["2031-01-01"])
    assert crosstie("catalog", "revert").out == "release 2031-01-01 is gone; the shipped data are in force\n"
    assert json.loads(crosstie("plan", str(question), "--quick", "--json").out)["fleet"]["gpus"] == before
    assert crosstie("catalog", "revert").status == 2


@pytest.mark.usefixtures("known_good")
def test_the_users_own_files_stand_over_a_release(crosstie: Command, pack: Pack, public: Path, tmp_path: Path) -> None:
    question = small(tmp_path)
    own = tmp_path / "user-catalog"
    own.mkdir()
    (own / "prices.csv").write_text(HEAD + "mi300x,us,on-demand,1.5,USD/h,claimed,2026-01-01,our contract,\n")
    assert crosstie("catalog", "update", str(pack()), "--key", str(public), "--plan", str(question)).status == 0
    assert json.loads(crosstie("plan", str(question), "--quick", "--json").out)["prices"]["mi300x"]["usd"] == 1.5


@pytest.mark.usefixtures("known_good")
def test_two_updates_and_back_one_by_one(crosstie: Command, pack: Pack, public: Path, tmp_path: Path) -> None:
    question = str(small(tmp_path))
    for day in ("2031-01-01", "2031-02-01"):
        assert crosstie("catalog", "update", str(pack(day)), "--key", str(public), "--plan", question).status == 0
    for day in ("2031-02-01", "2031-01-15"):
        again = crosstie("catalog", "update", str(pack(day)), "--key", str(public))
        assert (again.status, again.out) == (2, "")
        assert f"release {day} is no newer than 2031-02-01, in force" in again.err
    assert "release 2031-01-01 is in force" in crosstie("catalog", "revert").out
    assert "in force: release 2031-01-01" in crosstie("catalog", "status").out
    assert "the shipped data are in force" in crosstie("catalog", "revert", "--all").out


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_dry_run_changes_nothing(
    crosstie: Command, pack: Pack, public: Path, data_home: Path, tmp_path: Path
) -> None:
    question = str(small(tmp_path))
    options = ("--key", str(public), "--plan", question, "--dry-run", "--json")
    got = json.loads(crosstie("catalog", "update", str(pack()), *options).out)
    assert (got["in_force"], got["plans"][0]["flips"]) == (False, True)
    assert list(data_home.iterdir()) == []


@pytest.mark.usefixtures("known_good")
def test_models_of_a_release_are_used(crosstie: Command, pack: Pack) -> None:
    shipped = (Path(release_file.__file__).parent / "data" / "models" / "llama-3.1-8b.toml").read_text()
    new = shipped.replace('id = "llama-3.1-8b"', 'id = "llama-9-8b"')
    file = pack(**{"models/llama-9-8b.toml": "\n".join(line for line in new.splitlines() if "aliases" not in line)})
    assert crosstie("catalog", "update", str(file), "--unsigned").status == 0
    assert crosstie("fit", "llama-9-8b", "--on", "mi300x").status == 0


@pytest.mark.slow
def test_rules_that_are_none_are_not_taken(crosstie: Command, pack: Pack, data_home: Path) -> None:
    broken = pack(**{"preflight/rules/vllm-new.toml": "[[rule]]\nid = 1\n"})
    assert "is not taken: preflight/rules/vllm-new.toml" in refused(crosstie, data_home, str(broken), "--unsigned")


@pytest.mark.usefixtures("known_good")
def test_a_signature_must_hold(crosstie: Command, pack: Pack, public: Path, data_home: Path, tmp_path: Path) -> None:
    file = pack()
    # No key ships, and none was named.
    assert "no release key ships with this version" in refused(crosstie, data_home, str(file))
    other = tmp_path / "other.pem"
    pair = Ed25519PrivateKey.generate().public_key()
    other.write_bytes(pair.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert "signed with a key that is not known" in refused(crosstie, data_home, str(file), "--key", str(other))
    document = json.loads(file.read_text())
    spoilt = document["content"]
    document["content"] = spoilt[:100] + ("A" if spoilt[100] != "A" else "B") + spoilt[101:]
    file.write_text(json.dumps(document))
    assert "signature: does not hold" in refused(crosstie, data_home, str(file), "--key", str(public))
    bare = pack("2031-05-01", signed=False)
    assert "is not signed; --unsigned takes it" in refused(crosstie, data_home, str(bare), "--key", str(public))
    assert "is no Ed25519 key" in refused(crosstie, data_home, str(pack()), "--key", str(small(tmp_path)))
    assert crosstie("catalog", "update", str(bare), "--unsigned", "--plan", str(small(tmp_path))).status == 0


@pytest.mark.usefixtures("known_good")
def test_a_key_that_ships_is_trusted_without_being_named(
    crosstie: Command, pack: Pack, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "only files signed with a key that --key names are taken" in " ".join(
        crosstie("catalog", "status").out.split()
    )
    assert json.loads(crosstie("catalog", "status", "--json").out)["ships_key"] is False
    monkeypatch.setattr(release_file, "_SHIPPED_KEY", public)
    got = crosstie("catalog", "update", str(pack()), "--plan", str(small(tmp_path)), "--dry-run")
    assert got.status == 0, got.err
    assert "signed by key " in got.out
    assert json.loads(crosstie("catalog", "status", "--json").out)["ships_key"] is True


def test_the_repository_has_no_private_key() -> None:
    kept = subprocess.run(
        ["git", "grep", "-lE", "^-----BEGIN ([A-Z]+ )*PRIVATE KEY"], cwd=ROOT, capture_output=True, text=True
    )
    assert (kept.returncode, kept.stdout) == (1, "")


@pytest.mark.usefixtures("known_good")
def test_results_of_a_release_are_learnt_from(
    crosstie: Command, pack: Pack, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalog: Catalog
) -> None:
    """One that has the name of a shipped file takes its place, another stands beside them."""
    mine, own = results(tmp_path / "mine.csv", catalog), results(tmp_path / "own.csv", catalog, {"kernel": 0.5}, 3)
    shipped = tmp_path / "results.csv.gz"
    shipped.write_bytes(gzip.compress(results(tmp_path / "two.csv", catalog, {}, 2).read_bytes()))
    monkeypatch.setattr(learning, "SHIPPED_RESULTS", (shipped,))
    packed = gzip.compress(own.read_bytes())
    folder = tmp_path / "files-2031-01-01" / "measured"
    folder.mkdir(parents=True)
    (folder / "results.csv.gz").write_bytes(packed)
    (folder / "results-new.csv.gz").write_bytes(packed)
    file = pack(**{"prices.csv": DEAR})
    target, question = str(tmp_path / "out.json"), str(small(tmp_path))
    assert crosstie("catalog", "update", str(file), "--key", str(public), "--plan", question).status == 0
    found = json.loads(crosstie("calibrate", str(mine), "--full", "-o", target, "--json").out)["results"]
    assert [(one["file"], one["points"]) for one in found] == [
        ("results.csv.gz", 3), ("results-new.csv.gz", 3), ("mine.csv", 4),
    ]  # fmt: skip
    # What ships must not hang on what somebody has installed.
    found = json.loads(crosstie("calibrate", "--shipped", "-o", target, "--json").out)["results"]
    assert [(one["file"], one["points"]) for one in found] == [("results.csv.gz", 2)]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("day", "files", "words"),
    [
        ("2020-01-01", {"prices.csv": DEAR}, "is no newer than 20"),
        ("2031-01-01", {"prices.csv": DEAR.replace("mi300x", "mi999x")}, "prices.csv: line 2: accelerator 'mi999x'"),
        ("2031-01-01", {"calibration.json": "{}"}, "is not taken: calibration.json"),
        ("2031-01-01", {"measured/results.csv.gz": "no gzip"}, "is not taken: measured/results.csv.gz"),
        ("2031-01-01", {"measured/results-new.csv.gz": "no gzip"}, "is not taken: measured/results-new.csv.gz"),
    ],
)
def test_what_is_not_taken(
    crosstie: Command, pack: Pack, public: Path, data_home: Path, day: str, files: dict[str, str], words: str
) -> None:
    assert words in refused(crosstie, data_home, str(pack(day, **files)), "--key", str(public))


def test_names_that_no_catalog_has_are_not_unpacked(
    crosstie: Command, pack: Pack, public: Path, data_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = pack()
    monkeypatch.setattr(release_file, "MOST_UNPACKED", 100)
    assert "unpacks to more than" in refused(crosstie, data_home, str(file), "--key", str(public))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(Exception, match="is no file of a release"):
        pack("2031-06-01", **{"prices.csv": DEAR, "evil.py": "boom"})
    harmless = release_file.NAMES
    monkeypatch.setattr(release_file, "NAMES", re.compile(".*"))
    evil = pack("2031-07-01", **{"prices.csv": DEAR, "evil.py": "boom"})
    monkeypatch.setattr(release_file, "NAMES", harmless)
    assert "evil.py: is no file of a release" in refused(crosstie, data_home, str(evil), "--key", str(public))


class Server(ThreadingHTTPServer):
    body = b""
    how = "whole"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever has read enough hangs up; that is no news for the command's own output."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        how, body = self.server.how, self.server.body
        if how.startswith("to "):
            self.send_response(302)
            self.send_header("Location", how.removeprefix("to "))
            self.end_headers()
            return
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        if how != "without length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if how == "cut off" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.mark.usefixtures("known_good")
def test_an_update_over_http(crosstie: Command, pack: Pack, public: Path, server: Server, tmp_path: Path) -> None:
    server.body, server.how = pack().read_bytes(), "without length"
    url = f"http://127.0.0.1:{server.server_port}/catalog.json"
    got = crosstie("catalog", "update", url, "--key", str(public), "--plan", str(small(tmp_path)))
    assert got.status == 0, got.err
    assert f"from {url}" in crosstie("catalog", "status").out


@pytest.mark.parametrize(
    ("how", "path", "words"),
    [
        ("cut off", "/c.json", "cut off after"),
        ("whole", "/gone", "HTTP 404"),
        ("to file:///etc/passwd", "/c.json", "Redirection to url 'file:///etc/passwd' is not allowed"),
        ("to ftp://127.0.0.1/c.json", "/c.json", "sends on to ftp://127.0.0.1/c.json, which is not followed"),
    ],
)
def test_what_a_server_may_do_wrong(
    crosstie: Command, pack: Pack, public: Path, data_home: Path, server: Server, how: str, path: str, words: str
) -> None:
    server.body, server.how = pack().read_bytes(), how
    url = f"http://127.0.0.1:{server.server_port}{path}"
    assert words in refused(crosstie, data_home, url, "--key", str(public))


def test_a_huge_file_is_not_read_to_its_end(
    crosstie: Command, data_home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_file, "MOST_BYTES", 2**20)
    server.body = b" " * 2**22
    url = f"http://127.0.0.1:{server.server_port}/c.json"
    for how in ("whole", "without length"):
        server.how = how
        assert "is more than 1 MiB" in refused(crosstie, data_home, url)


def test_other_addresses_are_refused(crosstie: Command, data_home: Path, tmp_path: Path) -> None:
    assert "only files, http and https" in refused(crosstie, data_home, "ftp://127.0.0.1/c.json")
    assert "cannot be reached" in refused(crosstie, data_home, "http://127.0.0.1:9/c.json")
    assert "No such file" in refused(crosstie, data_home, str(tmp_path / "none.json"))
    half = tmp_path / "half.json"
    half.write_text('{"format": "crosstie cat')
    assert "or cut off" in refused(crosstie, data_home, str(half))


def test_a_broken_list_of_releases_is_named_and_removed(crosstie: Command, data_home: Path) -> None:
    data_home.mkdir(parents=True)
    (data_home / "in-force.json").write_text("{")
    got = crosstie("fit", "llama-3.1-8b", "--on", "mi300x")
    assert got.status == 2
    assert "in-force.json: cannot be read" in got.err
    assert crosstie("catalog", "revert", "--all").status == 0
    assert crosstie("fit", "llama-3.1-8b", "--on", "mi300x").status == 0


@pytest.mark.usefixtures("known_good")
def test_a_release_that_the_shipped_data_have_overtaken_is_not_used(
    crosstie: Command, pack: Pack, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = str(small(tmp_path))
    assert crosstie("catalog", "update", str(pack()), "--key", str(public), "--plan", question).status == 0
    monkeypatch.setattr("crosstie.catalog.releases.shipped_release", lambda: "2032-01-01")
    assert all(price.amount.source != "shop.example" for price in Catalog().prices)
    monkeypatch.setattr("crosstie.cli.catalog_update.shipped_release", lambda: "2032-01-01")
    assert "older than the shipped data, so not used" in crosstie("catalog", "status").out


def test_pack_by_the_command(crosstie: Command, tmp_path: Path, key: Ed25519PrivateKey, public: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "prices.csv").write_text(DEAR)
    pem = tmp_path / "private.pem"
    pem.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    target, options = tmp_path / "new.json", ("--release", "2031-01-01", "--sign", str(pem))
    assert crosstie("catalog", "pack", str(tmp_path / "d"), *options, "-o", str(target)).status == 0
    release, files, signer = release_file.opened("new.json", target.read_bytes(), [public], unsigned=False)
    assert (release.release, list(files), len(signer)) == ("2031-01-01", ["prices.csv"], 16)
    for wrong in (["--release", "tomorrow"], ["--release", "2031-01-01", "--sign", str(public)]):
        assert crosstie("catalog", "pack", str(tmp_path / "d"), *wrong, "-o", str(target)).status == 2
    assert crosstie("catalog", "pack", str(tmp_path / "none"), *options, "-o", str(target)).status == 2


@pytest.mark.usefixtures("without_plans", "in_this_process")
def test_a_release_may_bring_acceptance(crosstie: Command, public: Path, pack: Pack) -> None:
    rows = (
        "model,method,text,lengths,low,high,basis,date,source,note\n"
        "deepseek-r1,mtp,chat,1:1.6 2:1.9,0.9,1.1,measured,2031-01-01,a study,\n"
    )
    assert crosstie("catalog", "update", str(pack(**{"acceptance.csv": rows})), "--key", str(public)).status == 0
    got = json.loads(crosstie("catalog", "list", "acceptance", "--json").out)
    assert got[0]["tokens a step by drafts"] == "1:1.60 2:1.90"
    bad = pack(release="2031-02-01", **{"acceptance.csv": rows.replace("1:1.6", "1:2.6")})
    refused = crosstie("catalog", "update", str(bad), "--key", str(public))
    assert refused.status == 2
    assert "1 drafts give 1 to 2" in refused.err


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("prices.csv", True),
        ("acceptance.csv", True),
        ("connectors.toml", True),
        ("models/llama-9.toml", True),
        ("measured/results.csv.gz", True),
        ("measured/results-2026-12.csv.gz", True),
        ("measured/mi300x-probe.json", True),
        ("measured/../results.csv.gz", False),
        ("preflight/rules/vllm-gemm.toml", True),
        ("../prices.csv", False),
        ("models/../../prices.toml", False),
        ("/etc/passwd", False),
        ("plugin.py", False),
    ],
)
def test_which_names_a_release_may_have(name: str, may: bool) -> None:
    assert bool(release_file.NAMES.fullmatch(name)) == may
