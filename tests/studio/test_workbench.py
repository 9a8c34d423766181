"""Work on runs from a page: on this machine, with the token, after a look, and by the studio's own pages alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from fedloom.cli import app as cli
from fedloom.config import load_config
from fedloom.errors import ConfigError
from fedloom.experiment import load
from fedloom.runs import background
from fedloom.runs.at_work import worker_of
from fedloom.runs.folder import RunFolder
from fedloom.studio.app import make_app
from fedloom.studio.gate import LARGEST_DEED, Admission
from fedloom.studio.server import Listener
from fedloom.studio.studio import Studio
from html_pages import Page
from support import wait_for

TOKEN = "a-token-that-is-long-enough"
ADDRESS = "http://localhost:8260"
DOOR = Admission(frozenset({"localhost"}), token=TOKEN, cookie="studio", works=True)
FEW = "rounds=5000 data.silos=2 data.records_per_silo=40 model.hidden=[16] local.steps=1 evaluation.metrics=[]"


@pytest.fixture
def bench(root: Path) -> Iterator[TestClient]:
    """A workbench over a copy of the runs; whoever is still at work at the end is killed."""
    app = make_app(Studio.over(root, root.parent / "papers", works=True), DOOR)
    yield TestClient(app, base_url=ADDRESS, follow_redirects=False, cookies={"studio": TOKEN})
    for folder in root.iterdir():
        if worker := worker_of(folder):
            os.kill(worker.process, signal.SIGKILL)


def form_of(client: TestClient, **asked: str) -> dict[str, str]:
    """The form of the page that shows a deed."""
    answer = client.get("/work/look", params=asked, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    page = Page(answer.text)
    assert [each.get("action") for each in page.all("form")] == ["/work"]
    return {each["name"]: each["value"] for each in page.all("input") if "name" in each}


def sent(client: TestClient, form: dict[str, str], origin: str = ADDRESS) -> tuple[int, str]:
    answer = client.post("/work", data=form, headers={"Origin": origin} if origin else {})
    return answer.status_code, answer.text


def test_a_run_is_begun_stopped_and_gone_on_with(bench: TestClient, root: Path) -> None:
    form = form_of(bench, deed="begin", source="demo", settings=FEW, name="mine")
    assert not (root / "mine").exists()  # a look does nothing
    assert sent(bench, form)[0] == 303
    worker = worker_of(root / "mine")
    assert worker is not None
    assert load_config(root / "mine" / "run.toml").rounds == 5000
    assert "running" in Page(bench.get("/").text).text
    key = next(href for href in Page(bench.get("/").text).values("href") if href.startswith("/runs/"))
    wait_for(lambda: list((root / "mine").glob("checkpoints/round-*")))
    run = key.rpartition("/")[2]
    assert sent(bench, form_of(bench, deed="stop", run=run))[0] == 303
    assert worker_of(root / "mine") is None
    wait_for(lambda: "silent" in Page(bench.get("/").text).text)  # at the next look, and not after two minutes
    assert sent(bench, form_of(bench, deed="resume", run=run))[0] == 303
    assert worker_of(root / "mine") is not None


def test_a_finished_run_is_trained_on(bench: TestClient, root: Path, keys: dict[str, str]) -> None:
    assert 'value="4"' in bench.get(f"/runs/{keys['four']}").text
    assert sent(bench, form_of(bench, deed="extend", run=keys["four"], rounds="3"))[0] == 303
    wait_for(lambda: worker_of(root / "four") is None)
    assert load(root / "four").folder.rounds_done == 3


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed on is made in this process: another would take its time to start."""

    def perform(words: Sequence[str]) -> background.Performed:
        done = CliRunner().invoke(cli, list(words))
        return background.Performed(done.exit_code, done.output)

    monkeypatch.setattr(background, "perform", perform)


@pytest.mark.usefixtures("at_once")
def test_a_run_is_handed_on(bench: TestClient, root: Path, keys: dict[str, str]) -> None:
    """Certificate, data set and generators, each by the command that is shown."""
    run, page = keys["four"], f"/runs/{keys['four']}/release"
    assert "no DP guarantee" in Page(bench.get(page).text).text
    assert sent(bench, form_of(bench, deed="certify", run=run, approval="Ada, steward, 2026-05-31"))[0] == 303
    made = json.loads((root / "four" / "certificate" / "certificate.json").read_text())
    assert made["matter"]["approvals"] == [{"name": "Ada", "role": "steward", "date": "2026-05-31"}]
    shown = Page(bench.get(page).text)
    assert made["verdict"] in shown.text
    for name, kind in (("certificate.html", "text/html"), ("certificate.pdf", "application/pdf")):
        assert f"/runs/{run}/certificate/{name}" in shown.values("href")
        answer = bench.get(f"/runs/{run}/certificate/{name}")
        assert answer.content == (root / "four" / "certificate" / name).read_bytes()
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
    asked = {"deed": "synthesize", "run": run, "records": "8", "format": "npz"}
    status, text = sent(bench, form_of(bench, **asked))
    assert (status, "no DP guarantee" in text) == (400, True)
    assert not (root / "four" / "dataset").exists()
    for name in ("dataset", "dataset-2"):
        form = form_of(bench, **asked, risk="accepted")
        assert sent(bench, form)[0] == 303
        manifest = json.loads((root / "four" / name / "manifest.json").read_text())
        assert (manifest["records"], manifest["format"]) == (8, "npz")
    # Somebody else was faster, and what this one saw is no more what would be done.
    assert sent(bench, form)[0] == 400
    assert sent(bench, form_of(bench, deed="export", run=run, risk="accepted"))[0] == 303
    text = Page(bench.get(page).text).text
    for name in ("dataset", "dataset-2", "generators"):
        assert str(root / "four" / name) in text
        assert "".join((root / "four" / name / "README.md").read_text().split()) in "".join(text.split())


def test_a_run_that_is_not_finished_is_not_handed_on(bench: TestClient, root: Path, keys: dict[str, str]) -> None:
    RunFolder.open(root / "four").end("diverged", 2, "a loss that is not finite")
    page = bench.get(f"/runs/{keys['four']}/release").text
    assert "only a finished run is handed on" in Page(page).text
    assert "data-deed" not in page


@pytest.mark.parametrize("name", ["manifest.json", "certificate.txt", "..%2frun.toml"])
def test_no_other_file_is_handed_out(bench: TestClient, name: str, keys: dict[str, str]) -> None:
    assert bench.get(f"/runs/{keys['four']}/certificate/{name}").status_code == 404


def test_links_are_not_handed_out(bench: TestClient, root: Path, keys: dict[str, str]) -> None:
    (root / "secret").write_text("the secret outside")
    for name in ("certificate", "dataset"):
        (root / "four" / name).mkdir()
    (root / "four" / "certificate" / "certificate.html").symlink_to(root / "secret")
    (root / "four" / "dataset" / "README.md").symlink_to(root / "secret")
    (root / "four" / "dataset" / "manifest.json").write_text("{}")
    page = bench.get(f"/runs/{keys['four']}/release")
    assert page.status_code == 200
    assert "the secret" not in page.text
    assert "/certificate/certificate.html" not in page.text
    assert bench.get(f"/runs/{keys['four']}/certificate/certificate.html").status_code == 404


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": "rounds=1"}, "was not confirmed"),
        ({"name": "other"}, "was not confirmed"),
        ({"seal": ""}, "was not confirmed"),
        ({"seal": "0" * 64}, "was not confirmed"),
        ({"deed": "remove"}, "unknown deed"),
    ],
)
def test_nothing_is_done_but_what_was_shown(change: dict[str, str], words: str, bench: TestClient, root: Path) -> None:
    form = form_of(bench, deed="begin", source="demo", settings=FEW, name="mine")
    status, text = sent(bench, form | change)
    assert status == 400
    assert words in text
    assert not (root / "mine").exists()


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://localhost:1"])
def test_another_site_does_nothing(origin: str, bench: TestClient, root: Path) -> None:
    form = form_of(bench, deed="begin", source="demo", settings=FEW, name="mine")
    assert sent(bench, form, origin)[0] == 403
    assert not (root / "mine").exists()


def test_without_the_token_nothing_is_seen_or_done(bench: TestClient) -> None:
    form = form_of(bench, deed="begin", source="demo", settings=FEW, name="mine")
    bench.cookies.clear()
    assert sent(bench, form)[0] == 401
    assert bench.get("/work/begin").status_code == 401


def test_a_large_form_is_refused(bench: TestClient) -> None:
    assert sent(bench, {"settings": "x" * LARGEST_DEED})[0] == 413


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"deed": "begin", "source": "demo", "name": "../out"}, "letters, digits"),
        ({"deed": "begin", "source": "demo", "name": ".hidden"}, "letters, digits"),
        ({"deed": "begin", "source": "demo", "name": "four"}, "there is a run 'four' already"),
        ({"deed": "begin", "source": "/etc/run.toml", "name": "mine"}, "unknown preset"),
        ({"deed": "begin", "source": "demo", "settings": "rounds=many", "name": "mine"}, "must be a whole number"),
        ({"deed": "begin", "source": "demo", "settings": "--out=/tmp/x", "name": "mine"}, "unknown key"),
        ({"deed": "stop", "run": "nothing"}, "no such run"),
        ({"deed": "extend", "run": "four", "rounds": "-1"}, "no such run"),
        ({"deed": "certify", "run": "KEY", "approval": "Ada"}, "name, role, date"),
        ({"deed": "synthesize", "run": "KEY", "records": "0", "format": "npz"}, "whole number up to 1,000,000"),
        ({"deed": "synthesize", "run": "KEY", "records": "9", "format": "exe"}, "unknown format"),
    ],
)
def test_a_mistake_is_said_before_anything_is_shown(
    asked: dict[str, str], words: str, bench: TestClient, keys: dict[str, str]
) -> None:
    run = {"run": keys["four"]} if asked.get("run") == "KEY" else {}
    answer = bench.get("/work/look", params=asked | run)
    assert answer.status_code in (400, 404)
    assert words in answer.text


def test_what_fails_at_once_says_why(bench: TestClient, root: Path) -> None:
    settings = FEW + " data.source=npz data.path=nowhere.npz"
    status, text = sent(bench, form_of(bench, deed="begin", source="demo", settings=settings, name="mine"))
    assert status == 400
    assert "data.path = 'nowhere.npz' does not exist" in text
    assert not (root / "mine").exists()


def test_hostile_settings_are_shown_as_they_are(bench: TestClient) -> None:
    settings = "name='<script>alert(1)</script>'"
    asked = {"deed": "begin", "source": "demo", "settings": settings, "name": "mine"}
    answer = bench.get("/work/look", params=asked, headers={"Accept": "text/html"})
    assert "<script>alert" not in answer.text
    assert "<script>alert(1)</script>" in Page(answer.text).text


def test_a_studio_that_reads_has_no_deeds(client: TestClient, keys: dict[str, str]) -> None:
    assert client.get("/work/begin").status_code == 404
    assert client.post("/work", data={"deed": "stop"}, headers={"Origin": ADDRESS}).status_code == 405
    assert "data-deed" not in client.get(f"/runs/{keys['four']}").text


def test_work_is_for_this_machine_and_asks_for_a_token() -> None:
    place = Listener.of("127.0.0.1", 0, "", works=True)
    place.listener.close()
    assert len(place.door.token) > 20
    with pytest.raises(ConfigError, match=r"--work is for this machine alone"):
        Listener.of("0.0.0.0", 0, "", works=True)
