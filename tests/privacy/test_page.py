"""The pages about privacy against the code: settings, presets, methods, commands, tests."""

from __future__ import annotations

import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

from fedloom.config import PrivacyConfig, load_config
from fedloom.methods.base import METHODS
from fedloom.presets import preset_names

NAMES = re.compile(r"`([^`]+)`")
ROOT = Path(__file__).parents[2]
PAGES = ("privacy.md", "reference/privacy.md", "reference/threats.md", "how-to/audit.md", "reference/attacks.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)


def test_every_setting_is_named_and_no_other() -> None:
    told = re.search(r"explain every setting: (.+?)\.\n", PAGE, flags=re.DOTALL)
    assert told is not None
    assert sorted(["mechanism", *NAMES.findall(told[1])]) == sorted(field.name for field in fields(PrivacyConfig))


def test_the_presets_with_a_tick_are_those_with_a_sound_mechanism() -> None:
    table = PAGE.partition("| preset | fully private")[2].partition("| all others |")[0]
    ticked, shortcuts = (
        [
            name
            for row in re.findall(rf"^\| (`.*`) \| {verdict}", table, flags=re.MULTILINE)
            for name in NAMES.findall(row)
        ]
        for verdict in ("✓", "none")
    )
    for name in preset_names():
        settings = load_config(name).privacy
        private = settings.mechanism == "dp-sgd"
        sound = private and not settings.blocks and settings.clipping != "median"
        assert any(fnmatch(name, pattern) for pattern in ticked) == sound, name
        assert any(fnmatch(name, pattern) for pattern in shortcuts) == (private and not sound), name


def test_every_test_that_is_cited_is_there() -> None:
    """A file, or one test by its whole name."""
    cited = {name for name in NAMES.findall(PAGE) if re.fullmatch(r"tests/[\w/.]+|test_\w+", name)}
    files = {name for name in cited if name.startswith("tests/")}
    assert len(files) >= 5
    assert len(cited - files) >= 10
    assert all((ROOT / file).is_file() for file in files), files
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert cited - files <= set(re.findall(r"^def (test_\w+)\(", written, flags=re.MULTILINE))


def test_every_method_has_a_row() -> None:
    table = PAGE.partition("| method | fully private")[2].partition("\n\n")[0]
    assert set(METHODS) <= set(re.findall(r"`(\w+)`", table))


def test_commands_name_presets_and_settings_that_exist() -> None:
    commands = re.findall(r"fedloom run ([\w/-]+)((?: +[\w.]+=\S+)*)", PAGE)
    epsilons = [load_config(name, settings.split()).privacy.epsilon for name, settings in commands]
    assert epsilons == [3, 10, 10, 0]
