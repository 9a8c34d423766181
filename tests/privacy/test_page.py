"""docs/privacy.md against the code: settings, presets, methods, commands."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fedloom.config import PrivacyConfig, load_config, preset_names
from fedloom.methods.base import recipes

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")


def test_every_setting_is_explained_and_no_other() -> None:
    told = re.findall(r"^\| `privacy\.(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(["mechanism", *told]) == sorted(field.name for field in fields(PrivacyConfig))


def test_the_presets_with_a_tick_are_those_with_a_mechanism() -> None:
    ticked = re.findall(r"^\| `([\w/-]+)` \| ✓ \|$", PAGE, flags=re.MULTILINE)
    private = [name for name in preset_names() if load_config(name).privacy.mechanism == "dp-sgd"]
    assert ticked == private == ["privacy/demo-dp"]


def test_every_method_has_a_row() -> None:
    table = PAGE.partition("| method | fully private")[2].partition("\n\n")[0]
    assert set(recipes()) <= set(re.findall(r"`(\w+)`", table))


def test_commands_name_presets_and_settings_that_exist() -> None:
    commands = re.findall(r"fedloom run ([\w/-]+)((?: +[\w.]+=\S+)*)", PAGE)
    assert len(commands) == 2
    assert all(load_config(name, settings.split()).privacy.epsilon == 10 for name, settings in commands)
