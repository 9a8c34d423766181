"""How files declare presets, and what every preset has always been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom import presets
from fedloom.config import Config, load_config
from fedloom.errors import ConfigError
from fedloom.presets import about_preset, preset_names, read_settings

FINGERPRINTS: dict[str, str] = json.loads(Path(__file__).with_name("preset_fingerprints.json").read_text("utf-8"))

GRID = """
about = "Table 1"
extends = "base"
rounds = 2

[bases.small]
about = "MNIST"
data.source = "mnist"

[bases.large]
about = "CHARM"
rounds = 3

[rows.plain]
about = "as published"

[rows.wave]
about = "a wave"
method = { name = "fissionvae", prior = "wave" }
rounds = 4

[rows.both]
extends = "./wave"
method.decoder = "global"
rounds = 5
"""


def fingerprint(config: Config) -> str:
    """A hash of the settings that are not at their defaults, so that new settings do not change it."""

    def format_epsilon(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        inner = {
            key: format_epsilon(value, defaults.get(key) or {}) if isinstance(value, dict) else value
            for key, value in tree.items()
        }
        return {key: value for key, value in inner.items() if value not in (defaults.get(key), {})}

    text = json.dumps(format_epsilon(config.to_mapping(), Config().to_mapping()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of presets in place of the package's own."""
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    presets._declarations.cache_clear()
    (tmp_path / "base.toml").write_text('about = "The base"\nseed = 7\n[method]\nname = "moon"\nweight = 2.0\n')
    yield tmp_path
    presets._declarations.cache_clear()


def with_idle_clip(name: str, config: Config) -> Config:
    """DP-CVAE's rows without a mechanism used to keep the clip bound of their protocol, which nothing followed.

    Since ``mechanism = "none"`` takes no setting from beneath, they are without it. With it back they are what they
    were before: their results still hold, and went to the new identities as they are.
    """
    if not name.startswith("dp-cvae/") or config.privacy.mechanism != "none":
        return config
    return replace(config, privacy=replace(config.privacy, clip=1.5))


def test_every_name_is_the_experiment_that_it_has_always_been() -> None:
    found = {name: fingerprint(with_idle_clip(name, load_config(name))) for name in preset_names()}
    assert {name: found.get(name) for name in FINGERPRINTS} == FINGERPRINTS


def test_every_preset_may_be_run_as_it_is() -> None:
    for name in preset_names():
        load_config(name).privacy.check_mechanism()


def test_a_fingerprint_shows_any_setting() -> None:
    settings = ["seed=2", "name=other", "evaluation.samples=7", "method.prior=wave", "data.outliers.share=0.5"]
    assert len({fingerprint(load_config("demo", [setting])) for setting in [*settings, "rounds=40"]}) == 6


def test_a_file_of_rows_declares_each_row_on_each_base(folder: Path) -> None:
    (folder / "paper").mkdir()
    (folder / "paper" / "table.toml").write_text(GRID)
    names = [f"paper/table/{base}/{row}" for base in ("large", "small") for row in ("both", "plain", "wave")]
    assert preset_names() == ["base", *names]
    assert {name: read_settings(name)["rounds"] for name in names} == dict(zip(names, (5, 3, 4, 5, 2, 4), strict=True))
    assert read_settings("paper/table/small/plain") == {
        "name": "paper-table-small-plain",
        "seed": 7,
        "rounds": 2,
        "method": {"name": "moon", "weight": 2.0},
        "data": {"source": "mnist"},
    }


def test_a_row_goes_on_from_a_row_beside_it(folder: Path) -> None:
    (folder / "table.toml").write_text(GRID)
    found = read_settings("table/small/both")
    assert found["method"] == {"name": "fissionvae", "prior": "wave", "decoder": "global"}
    assert (found["seed"], found["data"]) == (7, {"source": "mnist"})
    assert "data" not in read_settings("table/large/both")


def test_what_is_common_does_not_undo_the_row_that_another_goes_on_from(folder: Path) -> None:
    (folder / "table.toml").write_text('rounds = 2\n[rows.one]\nrounds = 3\n[rows.two]\nextends = "./one"\n')
    assert [read_settings(f"table/{row}")["rounds"] for row in ("one", "two")] == [3, 3]


def test_a_line_about_a_preset_comes_from_file_base_and_row(folder: Path) -> None:
    (folder / "table.toml").write_text(GRID)
    assert about_preset("base") == "The base"
    assert about_preset("table/small/wave") == "Table 1, MNIST: a wave"


def test_a_file_takes_the_name_of_the_preset_that_it_extends(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "fissionvae/table3/deeper-mlp"\nabout = "a try"\nrounds = 3\n')
    config = load_config(path)
    assert (config.name, config.rounds) == ("fissionvae-table3-deeper-mlp", 3)
    assert config.model.branches == {"fashion-mnist": "deeper-mlp"}


def test_a_file_that_extends_nothing_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "demmo"\n')
    with pytest.raises(ConfigError, match=r"mine.toml: extends: unknown preset 'demmo'; did you mean 'demo'\?"):
        load_config(path)
