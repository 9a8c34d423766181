"""What there is to choose from, on one screen."""

from __future__ import annotations

import json

import pytest

from cli.conftest import Command
from fedloom.cli.settings_reference import settings_of
from fedloom.config import Config
from fedloom.presets import PAPERS, preset_names


def test_the_presets_to_start_from_fit_on_a_screen(fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = fedloom("list", "presets").stdout.splitlines()
    names = [line.split()[0] for line in lines[:-1]]
    assert {name.partition("/")[0] for name in names} >= {"demo", "embeddings", "federation", "privacy", "tables"}
    assert not {name.partition("/")[0] for name in names} & set(PAPERS)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"and {len(preset_names()) - len(names)} rows of papers' tables")


def test_papers_rows_are_listed_where_they_are_asked_for(fedloom: Command) -> None:
    assert list(json.loads(fedloom("list", "presets", "--papers", "--json").stdout)) == preset_names()
    some = json.loads(fedloom("list", "presets", "fissionvae/table3", "--json").stdout)
    assert set(some) == {f"fissionvae/table3/{row}" for row in ("deeper-mlp", "deeper-mlp-conv", "homogeneous")}


def test_every_setting_has_its_type_its_default_and_its_meaning(fedloom: Command) -> None:
    found = json.loads(fedloom("list", "settings", "--json").stdout)
    assert len(found) == len(list(settings_of(Config)))
    assert found["privacy.clip"] == {
        "type": "number, greater than 0",
        "default": "1.0",
        "meaning": "the bound on one gradient, or the first of them",
    }
    assert found["data.crop"]["type"] == "centre, pad, stretch"
    assert all(each["meaning"] and each["default"] for each in found.values())


def test_settings_are_shown_section_by_section(fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = fedloom("list", "settings", "privacy.").stdout
    assert "privacy.noise_multiplier " in text
    assert "local.epochs" not in text
