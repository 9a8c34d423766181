"""Which records stand beside samples, and which do not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from fedloom.errors import ConfigError
from fedloom.experiment import load, train
from fedloom.federation import sources
from fedloom.federation.building import build_federation
from fedloom.reports.panel_parts import held_out_of
from fedloom.reports.record_panels import BESIDE
from fedloom.runs.folder import RunFolder
from fedloom.runs.images import grid_of
from fedloom.streams import Streams
from fedloom.studio.app import make_app
from fedloom.studio.records import AT_SILOS, NOT_PUBLIC
from fedloom.studio.server import Listener
from fedloom.studio.studio import Studio
from html_pages import Page
from studio.conftest import LOCAL
from support import tiny_config


def client_of(folder: Path, with_records: bool = False) -> TestClient:
    studio = Studio.over(folder, folder, with_records=with_records)
    return TestClient(make_app(studio, LOCAL), base_url="http://localhost:8260", follow_redirects=False)


def records_on(client: TestClient, key: str) -> list[str]:
    found = Page(client.get(f"/runs/{key}").text).all("img")
    return [image["src"] for image in found if "/records/" in image["src"]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run on records of one's own."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x_train=rng.integers(0, 256, (40, 28, 28), dtype=np.uint8))
    data = ("data.source=npz", f"data.path={tmp_path / 'own.npz'}", "data.silos=2", "data.partition=iid")
    train(tiny_config(*data, "method.name=fedvae", "evaluation.every=1"), tmp_path / "runs" / "own")
    return tmp_path / "runs"


def test_held_out_records_of_a_public_source_stand_beside_samples(client: TestClient, keys: dict[str, str]) -> None:
    """Those of each group, as the configuration deals them."""
    found = records_on(client, keys["four"])
    assert found == [f"/runs/{keys['four']}/records/{place}" for place in range(2)]
    config = tiny_config("evaluation.every=1", "method.prior=symmetrical")
    federation, streams = build_federation(config.data, Streams(config.seed)), Streams(config.seed)
    for place, address in enumerate(found):
        answer = client.get(address)
        assert answer.headers["cache-control"] == "no-store"
        expected = grid_of(held_out_of(federation, place, BESIDE, streams).values, kind=federation.modality.name)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), np.asarray(expected.convert("L")))


def test_own_records_are_shown_where_it_was_asked_for(own: Path) -> None:
    key = next(iter(Studio.over(own, own).catalogue.entries()))
    assert records_on(client_of(own), key) == []
    assert NOT_PUBLIC in Page(client_of(own).get(f"/runs/{key}").text).text
    assert client_of(own).get(f"/runs/{key}/records/0").status_code == 404
    asked = client_of(own, with_records=True)
    assert records_on(asked, key) == [f"/runs/{key}/records/0"]
    assert asked.get(f"/runs/{key}/records/0").headers["content-type"] == "image/png"
    assert asked.get(f"/runs/{key}/records/1").status_code == 404


def test_who_made_the_folder_opens_no_file_by_saying_that_it_is_public(own: Path) -> None:
    toml = own / "own" / "run.toml"
    toml.write_text(toml.read_text().replace("public = false", "public = true"))
    assert load(own / "own").folder.data_source.public
    key = next(iter(Studio.over(own, own).catalogue.entries()))
    assert records_on(client_of(own), key) == []


def test_records_that_are_gone_are_a_sentence(own: Path) -> None:
    (own.parent / "own.npz").unlink()
    key = next(iter(Studio.over(own, own).catalogue.entries()))
    client = client_of(own, with_records=True)
    assert records_on(client, key) == []
    assert "does not exist" in Page(client.get(f"/runs/{key}").text).text


def test_records_of_a_federation_stay_at_its_silos(
    trained: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "is_deployed", True)
    client = client_of(trained, with_records=True)
    assert records_on(client, keys["four"]) == []
    assert AT_SILOS in Page(client.get(f"/runs/{keys['four']}").text).text


def test_records_are_loaded_once(
    root: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch, ask: Callable[..., TestClient]
) -> None:
    loaded: list[str] = []
    get = sources.SOURCES.get
    monkeypatch.setattr(sources.SOURCES, "get", lambda name, *more: loaded.append(name) or get(name, *more))
    client = ask(root)
    client.get(f"/runs/{keys['four']}")
    before = len(loaded)
    RunFolder.open(root / "four").end("diverged", 2, "a loss that is not finite")
    assert "Training diverged" in client.get(f"/runs/{keys['four']}").text
    assert len(loaded) <= before + 1  # to see whether they are public


def test_records_are_for_this_machine_and_ask_for_a_token() -> None:
    place = Listener.of("127.0.0.1", 0, "", with_records=True)
    place.listener.close()
    assert len(place.door.token) > 20
    assert not place.door.works
    with pytest.raises(ConfigError, match=r"--with-records is for this machine alone"):
        Listener.of("0.0.0.0", 0, "", with_records=True)
