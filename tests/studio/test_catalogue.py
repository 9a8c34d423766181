"""Which runs are found, and that nothing outside the runs folder is ever read."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fedloom.privacy.ledger import Ledger
from fedloom.studio import catalogue
from fedloom.studio.catalogue import Catalogue
from html_pages import Page
from studio.conftest import Ask

SECRET = "the secret outside"
HOSTILE = "'><img src=x onerror=alert(2)>"


def names(folder: Path) -> list[str]:
    return [entry.name for entry in Catalogue(folder.resolve()).entries().values()]


def test_runs_are_found_in_folders_of_folders(root: Path) -> None:
    shutil.copytree(root / "four", root / "a" / "b" / "c" / "d" / "too-deep")
    shutil.copytree(root / "four", root / "a" / "b" / "c" / "deep")
    shutil.copytree(root / "four", root / ".hidden")
    (root / "not a run").mkdir()
    assert names(root) == ["a/b/c/deep", "four", "sweep/two"]


def test_a_folder_that_may_not_be_read_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "locked").mkdir()
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent.name == "locked":
            raise PermissionError
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert names(root) == ["four", "sweep/two"]


def test_a_run_may_itself_be_the_folder(root: Path) -> None:
    assert names(root / "four") == ["four"]


def test_there_is_an_end_to_looking(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MOST_RUNS", 1)
    assert len(names(root)) == 1
    monkeypatch.setattr(catalogue, "MOST_FOLDERS", 1)
    assert names(root) == []


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    outside = shutil.copytree(root / "four", tmp_path / "outside")
    (root / "linked").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path)
    assert names(root) == ["four", "sweep/two"]


def link(name: str) -> Callable[[Path, Path], None]:
    def act(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)

    return act


def link_folder(run: Path, outside: Path) -> None:
    shutil.rmtree(run / "samples")
    (run / "samples").symlink_to(outside.parent)


def pipe(run: Path, outside: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


LEADING_OUT: dict[str, Callable[[Path, Path], None]] = {
    "configuration": link("run.toml"),
    "log": link("metrics.jsonl"),
    "egress log": link("egress.jsonl"),
    "environment": link("environment.json"),
    "status": link("status.json"),
    "ledger": link("ledger.sqlite"),
    "sample": link("samples/round-0002/mnist.png"),
    "another sample": link("samples/round-0002/z.png"),
    "checkpoint": link("checkpoints/round-0002/server.safetensors"),
    "folder of samples": link_folder,
    "pipe that nobody writes to": pipe,
}


@pytest.mark.parametrize("way", LEADING_OUT)
def test_a_run_that_leads_out_is_not_read(way: str, root: Path, tmp_path: Path, ask: Ask, keys: dict[str, str]) -> None:
    outside = tmp_path / "secret.txt"
    outside.write_text(f'{{"round": 2, "command": "{SECRET}", "state": "{SECRET}", "{SECRET}/x": 1}}\n')
    LEADING_OUT[way](root / "four", outside)
    client, key = ask(root), keys["four"]
    paths = ["", "/body", "/samples/2/0", "/samples/2/1", "/samples/2/2", "/explore", "/2/frame?values=0,0,0,0"]
    for path in ["/", f"/compare?run={key}&run={keys['sweep/two']}", *(f"/runs/{key}{path}" for path in paths)]:
        answer = client.get(path)
        assert SECRET not in answer.text
        assert answer.status_code == (200 if path == "/" else 404), path
    assert client.get(f"/runs/{keys['sweep/two']}").status_code == 200
    if way != "configuration":
        assert "is a link or no plain file" in client.get("/").text


def test_a_link_that_appears_later_is_not_followed(root: Path, tmp_path: Path, ask: Ask, keys: dict[str, str]) -> None:
    client, address = ask(root), f"/runs/{keys['four']}/samples/2/1"
    client.app.state.studio.watch.look()  # type: ignore[attr-defined]  # what is known of the run is not read again
    assert client.get(address).status_code == 200
    outside = shutil.copy(root / "four" / "samples" / "round-0002" / "mnist.png", tmp_path / "outside.png")
    link("samples/round-0002/mnist.png")(root / "four", Path(outside))
    assert client.get(address).status_code == 404
    moved = shutil.move(root / "four", tmp_path / "moved")
    (root / "four").symlink_to(moved)
    assert client.get(f"/runs/{keys['four']}").status_code == 404


def test_what_trackers_link_beside_a_run_does_no_harm(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    (root / "four" / "wandb" / "run-1").mkdir(parents=True)
    (root / "four" / "wandb" / "latest-run").symlink_to("run-1")
    (root / "four" / "latest").symlink_to(root / "four" / "wandb")
    assert ask(root).get(f"/runs/{keys['four']}").status_code == 200


def old_ledger(path: Path) -> None:
    """As the first version wrote it."""
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.execute("ALTER TABLE silos DROP COLUMN unit")
        older.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize("make_ledger", [Path.touch, old_ledger], ids=["empty", "of an older version"])
def test_looking_changes_no_file(
    root: Path, ask: Ask, keys: dict[str, str], make_ledger: Callable[[Path], object]
) -> None:
    toml = root / "four" / "run.toml"
    toml.write_text(toml.read_text().replace('mechanism = "none"', 'mechanism = "dp-sgd"'))
    make_ledger(root / "four" / "ledger.sqlite")
    client, files = ask(root), [path for path in root.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    key, chosen = keys["four"], f"run={keys['four']}&run={keys['sweep/two']}"
    for address in ("/", f"/runs/{key}", f"/runs/{key}/explore", f"/runs/{key}/2/sample?draw=1", f"/compare?{chosen}"):
        assert client.get(address).status_code == 200, address
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}
    assert after == before


def test_a_log_beyond_all_measure_is_not_read(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    os.truncate(root / "four" / "egress.jsonl", catalogue.LARGEST_TEXT + 1)
    answer = ask(root).get(f"/runs/{keys['four']}")
    assert (answer.status_code, answer.text) == (
        404,
        "run 'four' is not shown: egress.jsonl has more than 256,000,000 bytes",
    )


TRAVERSALS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%252f..%252fetc%252fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "%c0%ae%c0%ae%c0%afetc%c0%afpasswd",
    "/etc/passwd",
    "%00",
    "four/../../secret.txt",
    "four",
    "sweep%2ftwo",
]
NUMBERS = ("number", "place")
REFUSED = {
    (404, "there is no such run in the runs folder; it may have been moved"),
    (404, "there is no such file in the studio"),
    (404, "there is nothing at this address"),
    *((400, f"{name}: Input should be a valid integer, unable to parse string as an integer") for name in NUMBERS),
}


@pytest.mark.parametrize("path", TRAVERSALS)
@pytest.mark.parametrize("before", ["/runs/", "/static/", "/", "/runs/KEY/samples/2/", "/runs/KEY/samples/"])
def test_no_address_is_a_path(client: TestClient, keys: dict[str, str], before: str, path: str) -> None:
    answer = client.get(before.replace("KEY", keys["four"]) + path)
    assert (answer.status_code, answer.text) in REFUSED


def test_only_the_front_end_is_static(client: TestClient) -> None:
    for name in (
        "studio.css",
        "page.css",
        "page.js",
        "runs.js",
        "live.js",
        "explore.js",
        "events.js",
        "mark.svg",
        "tokens.css",
    ):
        assert client.get(f"/static/{name}").status_code == 200
    for name in ("app.py", "explore.html", "base.html", "__init__.py", "one_run.py"):
        assert client.get(f"/static/{name}").status_code == 404


def test_markup_in_names_stays_text(root: Path, ask: Ask) -> None:
    (root / "four").rename(root / HOSTILE)
    toml = root / HOSTILE / "run.toml"
    toml.write_text(toml.read_text().replace('name = "demo"', "name = \"<script>alert('title')</script>\""))
    (root / "broken <script>alert(3)").mkdir()
    (root / "broken <script>alert(3)" / "run.toml").write_text("= <script>alert(4)</script>")
    client = ask(root)
    keys = {entry.name: key for key, entry in Catalogue(root.resolve()).entries().items()}
    for path in ("/", f"/runs/{keys[HOSTILE]}", f"/runs/{keys[HOSTILE]}/explore"):
        page = Page(client.get(path).text)
        assert HOSTILE in page.text
        assert all(source.startswith(("/static/", "/runs/")) for source in page.values("src"))
        assert all("src" in script for script in page.all("script"))
        assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    assert "<script>alert('title')</script>" in Page(client.get("/").text).text
    assert "is not valid TOML" in client.get("/").text


def test_names_that_are_no_text_are_shown_all_the_same(root: Path, ask: Ask) -> None:
    (root / "four").rename(os.fsdecode(os.fsencode(root) + b"/\xff\xfe"))
    assert [name.encode("utf-8", "replace") for name in names(root)] == [b"sweep/two", b"??"]
    client = ask(root)
    assert ">??<" in client.get("/").text
    for key in Catalogue(root.resolve()).entries():
        assert client.get(f"/runs/{key}").status_code == 200
