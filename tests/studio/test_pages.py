"""What the pages say, and that they say it in one sentence where something is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from fedloom.runs.folder import RunFolder
from fedloom.studio import app, pages, studio
from fedloom.studio.catalogue import FoundRun
from fedloom.studio.run_summary import RunSummary
from fedloom.studio.watch import LiveRun
from html_pages import Page
from studio.conftest import Ask
from support import tiny_config


def page_of(client: TestClient, address: str) -> Page:
    answer = client.get(address, headers={"Accept": "text/html"})
    page = Page(answer.text)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert all(source.startswith(("/static/", "/runs/")) for source in page.values("src"))
    assert not page.values("style")
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    return page


def test_a_line_for_each_run(client: TestClient, keys: dict[str, str]) -> None:
    page = page_of(client, "/")
    assert {row["id"] for row in page.all("tr") if "id" in row} == {f"run-{key}" for key in keys.values()}
    assert {box["value"] for box in page.all("input") if box.get("name") == "run"} == set(keys.values())
    for words in ("four", "sweep/two", "fedvae", "fissionvae", "2 of 2", "no DP guarantee", "✓ finished"):
        assert words in page.text
    assert "spread" not in page.text.lower()  # it has no better side


@pytest.mark.parametrize(
    "part",
    [
        pages.run_row,
        lambda live_run: pages.part("runs_of_row", {"live_runs": [live_run]}),
        lambda live_run: pages.state_mark(live_run.state),
        lambda live_run: f"<main{pages.part('live', {'address': '', 'live_runs': [live_run]})}></main>",
    ],
)
def test_a_state_is_never_markup(part: Callable[[LiveRun], str]) -> None:
    """Even one that no reader lets through."""
    state = '"><form action="//evil.example">'
    found = Page(part(LiveRun(RunSummary(FoundRun("key", "run", Path()), "", 0.0), state)))
    assert not found.all("form")
    assert state in " ".join((found.text, *found.values("data-state"), *found.values("data-states")))


def test_each_line_has_the_newest_samples(client: TestClient, keys: dict[str, str]) -> None:
    page = page_of(client, "/")
    found = [image["src"] for image in page.all("img")]
    assert sorted(source.partition("?")[0] for source in found) == sorted(
        f"/runs/{key}/samples/2/0" for key in keys.values()
    )
    for source in found:
        assert client.get(source).headers["content-type"] == "image/png"


def test_a_folder_without_runs_says_how_to_begin(ask: Ask, tmp_path: Path) -> None:
    assert f"fedloom run demo --out {tmp_path.name}/first" in page_of(ask(tmp_path), "/").text


def test_a_run_that_cannot_be_read_stands_among_the_others(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    (root / "four" / "run.toml").write_text("rounds = 'many'")
    client = ask(root)
    page = page_of(client, "/")
    assert "rounds = 'many' must be a whole number" in page.text
    assert "! unreadable" in page.text
    assert f"/runs/{keys['four']}" not in page.values("href")
    answer = client.get(f"/runs/{keys['four']}")
    assert answer.status_code == 404
    assert "must be a whole number" in answer.text


def test_a_page_of_a_run_has_all_that_the_report_tells(client: TestClient, keys: dict[str, str]) -> None:
    page = page_of(client, f"/runs/{keys['four']}")
    assert [section["id"] for section in page.all("section")] == [
        *("heading", "samples", "silos", "sharing", "metrics", "training", "egress", "privacy"),
        *("reproduce", "environment", "configuration"),
    ]
    assert "Sizes and labels are missing: the studio reads nothing but the runs folder." in page.text
    assert f"/runs/{keys['four']}/explore" in page.values("href")
    assert len(page.all("img")) == 2 * 2 + 2  # groups and rounds, and records of each group
    assert len([svg for svg in page.all("svg") if svg.get("class") == "sharing"]) == 1


def test_what_a_run_is_doing_stands_once_on_its_page(client: TestClient, keys: dict[str, str]) -> None:
    whole = client.get(f"/runs/{keys['four']}").text
    cards = re.findall(r"<div><b>[^<]*</b><span>([^<]*)</span></div>", whole)
    assert cards == ["silos", "groups", "left the silos", "privacy"]
    heading = whole.partition('<section id="samples">')[0]
    assert (heading.count("2 of 2<"), heading.count("finished<")) == (1, 1)


def test_the_body_is_the_same_without_its_frame(client: TestClient, keys: dict[str, str]) -> None:
    whole, body = (client.get(f"/runs/{keys['four']}{part}").text for part in ("", "/body"))
    assert body in whole
    assert body.startswith('<section id="heading">')
    chosen = f"run={keys['four']}&run={keys['sweep/two']}"
    assert client.get(f"/compare/body?{chosen}").text in client.get(f"/compare?{chosen}").text


def test_pictures_are_those_of_the_run(client: TestClient, trained: Path, keys: dict[str, str]) -> None:
    sources = [image["src"] for image in page_of(client, f"/runs/{keys['four']}").all("img")]
    found = [np.asarray(Image.open(io.BytesIO(client.get(s).content))) for s in sources if "/samples/" in s]
    files = [f"round-000{number}/{group}.png" for group in ("mnist", "fashion-mnist") for number in (1, 2)]
    for pixels, file in zip(found, files, strict=True):
        assert np.array_equal(pixels, np.asarray(Image.open(trained / "four" / "samples" / file)))


@pytest.mark.parametrize("place", ["2/7", "7/0", "2/-1"])
def test_a_picture_that_is_not_there(client: TestClient, keys: dict[str, str], place: str) -> None:
    answer = client.get(f"/runs/{keys['four']}/samples/{place}")
    assert (answer.status_code, answer.text) == (404, f"there is no such picture of round {place[0]}")


def test_a_broken_picture_is_not_passed_on(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    (root / "four" / "samples" / "round-0002" / "mnist.png").write_bytes(b"<script>")
    answer = ask(root).get(f"/runs/{keys['four']}/samples/2/1")
    assert (answer.status_code, answer.text) == (404, "the picture of round 2 cannot be read")


def test_runs_are_compared_side_by_side(client: TestClient, keys: dict[str, str]) -> None:
    page = page_of(client, f"/compare?run={keys['four']}&run={keys['sweep/two']}")
    assert "2 runs compared" in page.text
    assert [section["id"] for section in page.all("section")] == [
        *("heading", "metrics", "differences", "samples", "warnings", "curves")
    ]
    assert "method.name" in page.text
    assert "model.latent" in page.text
    assert "model.hidden" not in page.text  # alike in both
    (main,) = page.all("main")
    assert main["data-keys"].split() == [keys["four"], keys["sweep/two"]]
    assert main["data-live"] == f"/compare/body?run={keys['four']}&run={keys['sweep/two']}"


@pytest.mark.parametrize("count", [0, 1, 9])
def test_few_or_many_runs_are_not_compared(client: TestClient, count: int) -> None:
    answer = client.get("/compare?" + "&".join(f"run={number}" for number in range(count)))
    assert (answer.status_code, answer.text) == (400, f"choose 2 to 8 runs to compare, not {count}")


def test_the_explorer_offers_what_there_is(client: TestClient, keys: dict[str, str]) -> None:
    page = page_of(client, f"/runs/{keys['four']}/explore")
    assert "round 2, 4 dimensions" in page.text
    assert [select["name"] for select in page.all("select")] == ["group", "prior", "pathway"]
    values = [option["value"] for option in page.all("option")]
    assert values == ["mnist", "fashion-mnist", "", "mnist", "fashion-mnist", "z1"]
    (main,) = page.all("main")
    assert (main["data-run"], main["data-round"], main["data-reach"]) == (keys["four"], "2", "3")


def test_before_the_first_checkpoint_there_is_nothing_to_explore(ask: Ask, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", tiny_config())
    client = ask(tmp_path)
    (key,) = re.findall(r'href="/runs/(\w+)"', client.get("/").text)
    answer = client.get(f"/runs/{key}/explore")
    assert answer.status_code == 400
    assert answer.text.endswith("holds no checkpoint, so there is nothing to load")
    assert client.get(f"/runs/{key}").status_code == 200


def test_a_damaged_checkpoint_is_one_sentence(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    index = root / "four" / "checkpoints" / "round-0002" / "index.json"
    facts = json.loads(index.read_text())
    index.write_text(json.dumps({**facts, "setting": {**facts["setting"], "shape": [1, 5, 5]}}))
    client = ask(root)
    answer = client.get(f"/runs/{keys['four']}/explore")
    assert answer.status_code == 404
    assert answer.text == "the checkpoint does not fit this run (RuntimeError)"
    assert client.get(f"/runs/{keys['four']}").status_code == 200


def test_mistakes_are_pages_for_people_and_lines_for_scripts(client: TestClient) -> None:
    assert client.get("/nowhere").text == "there is nothing at this address"
    page = page_of(client, "/nowhere")
    assert "Not shown" in page.text
    assert "there is nothing at this address" in page.text
    assert "/" in page.values("href")


def test_the_newest_state_is_read_and_the_old_one_kept_no_longer(root: Path, ask: Ask, keys: dict[str, str]) -> None:
    client, key = ask(root), keys["four"]
    assert "Training diverged" not in client.get(f"/runs/{key}").text
    RunFolder.open(root / "four").end("diverged", 2, "a loss that is not finite")
    assert "Training diverged in round 2: a loss that is not finite." in client.get(f"/runs/{key}").text


def test_a_story_is_told_once_until_something_changes(
    root: Path, ask: Ask, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    story = studio._told
    monkeypatch.setattr(studio, "_told", lambda entry: told.append(entry.name) or story(entry))
    client = ask(root)
    for _ in range(3):
        client.get(f"/runs/{keys['four']}")
    assert told == ["four"]
    RunFolder.open(root / "four").end("finished", 2)
    client.get(f"/runs/{keys['four']}")
    assert told == ["four", "four"]


def test_few_stories_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studio, "KEPT", 2)
    shelf, made = studio.MadeOnce(), []
    for name in ("a", "b", "a", "c", "a", "b"):
        assert shelf.get(name, 1, lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b", "c", "b"]
    assert not shelf._making, "a lock goes with the last who holds it"


def test_what_several_ask_for_at_a_time_is_made_once() -> None:
    shelf, made, begun, go_on = studio.MadeOnce(), [], threading.Event(), threading.Event()

    def make() -> str:
        made.append("a")
        begun.set()
        assert go_on.wait(10)
        return "a"

    with ThreadPoolExecutor(2) as crowd:
        first = crowd.submit(shelf.get, "a", 1, make)
        assert begun.wait(10)
        second = crowd.submit(shelf.get, "a", 1, make)
        go_on.set()
        assert (first.result(10), second.result(10), made) == ("a", "a", ["a"])
    assert not shelf._making


def test_the_stream_tells_of_every_run(client: TestClient, trained: Path, keys: dict[str, str]) -> None:
    watch = client.app.state.studio.watch  # type: ignore[attr-defined]
    watch.closed = False
    lines: list[str] = []

    async def listen() -> None:
        async for text in app._stream(watch, ()):
            lines.append(text)
            watch.closed = len(lines) == 2

    asyncio.run(listen())
    events = [dict(line.split(": ", 1) for line in text.strip().split("\n")) for text in lines]
    assert [event["event"] for event in events] == ["run", "run"]
    found = [json.loads(event["data"]) for event in events]
    assert {one["key"] for one in found} == set(keys.values())
    assert all(one["row"].startswith(f'<tr id="run-{one["key"]}"') for one in found)
    assert {one["state"] for one in found} == {"finished"}


@pytest.mark.parametrize(("watchers", "keys", "status"), [(31, 8, 200), (32, 0, 503), (0, 9, 503)])
def test_too_many_watchers_are_turned_away(trained: Path, watchers: int, keys: int, status: int) -> None:
    """Asked for without a connection: a stream that is let in by mistake would never end."""
    found = studio.Studio.over(trained, trained)
    found.watch.watchers = watchers
    answer = asyncio.run(app.events(found, [str(number) for number in range(keys)]))
    assert answer.status_code == status
