from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.errors import ConfigError, FedloomWarning
from fedloom.registry import NotAllowedError, Registry, allow_only
from plugins import install

GROUP = "fedloom.colours"


@dataclass(frozen=True)
class Colour:
    name: str
    hue: int


COLOURS: Registry[Colour] = Registry("colour", GROUP, Colour, lambda: {"red": Colour("red", 0)})
# What a package of plug-ins is made of; a value of a type that fedloom knows, without importing fedloom.
SOURCE = """\
from test_registry import Colour
GREEN = Colour("green", 120)
RED = Colour("red", 5)
NUMBER = 3
"""


@pytest.fixture
def folder(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    return plugin_folder


def test_what_an_installed_package_brings_is_found_by_name(folder: Path) -> None:
    install(folder, "Many_Colours", "1.2", SOURCE, {GROUP: {"green": "GREEN"}})
    assert list(COLOURS) == ["red", "green"]
    assert "Many_Colours" not in sys.modules
    assert COLOURS["green"].hue == 120
    assert [COLOURS.origin(name) for name in COLOURS] == ["fedloom", "many-colours==1.2"]


def test_an_import_path_names_a_value(folder: Path) -> None:
    (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
    assert COLOURS.get("mine:GREEN", "paint.colour").hue == 120


@pytest.mark.parametrize(
    ("points", "name", "sentence"),
    [
        (
            {"green": "GREEN"},
            "greed",
            "paint.colour: unknown colour 'greed'; did you mean 'green'? (allowed: green, red)",
        ),
        (
            {"red": "RED"},
            "red",
            "paint.colour: colour 'red' comes from fedloom and from colours==1.2; uninstall one of them",
        ),
        ({"blue": "NUMBER"}, "blue", "paint.colour: colour 'blue' of colours==1.2 is a int, not a Colour"),
        (
            {"blue": "GREEN"},
            "blue",
            "paint.colour: colour 'blue' of colours==1.2 calls itself 'green'; give it one name",
        ),
        (
            {"blue": "BLUE"},
            "blue",
            "paint.colour: colour 'blue' of colours==1.2 cannot be imported from 'colours:BLUE' (AttributeError: "
            "module 'colours' has no attribute 'BLUE')",
        ),
        (
            {},
            "nowhere:GREEN",
            "paint.colour: colour 'nowhere:GREEN' of no installed package cannot be imported from 'nowhere:GREEN' "
            "(ModuleNotFoundError: No module named 'nowhere'); have it on PYTHONPATH",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(folder: Path, points: dict[str, str], name: str, sentence: str) -> None:
    install(folder, "colours", "1.2", SOURCE, {GROUP: points})
    with pytest.raises(ConfigError) as caught:
        COLOURS.get(name, "paint.colour")
    assert str(caught.value) == sentence


def test_two_packages_with_one_name_are_both_named(folder: Path) -> None:
    install(folder, "one", "1.0", SOURCE, {GROUP: {"green": "GREEN"}})
    install(folder, "two", "2.0", SOURCE, {GROUP: {"green": "GREEN"}})
    with pytest.raises(ConfigError) as caught:
        COLOURS["green"]
    assert str(caught.value) in {
        f"colour 'green' comes from {first} and from {second}; uninstall one of them"
        for first, second in [("one==1.0", "two==2.0"), ("two==2.0", "one==1.0")]
    }
    assert COLOURS["red"].hue == 0


def test_a_broken_plug_in_is_in_nobodys_way(folder: Path) -> None:
    install(folder, "broken", "0.1", "import nothing_of_that_name\n", {GROUP: {"grey": "GREY"}})
    assert COLOURS["red"].hue == 0
    with pytest.warns(FedloomWarning) as warned:
        assert [name for name, _ in COLOURS.listed()] == ["red"]
    assert [str(warning.message) for warning in warned] == [
        "colour 'grey' of broken==0.1 cannot be imported from 'broken:GREY' (ModuleNotFoundError: No module named "
        "'nothing_of_that_name')"
    ]


@pytest.mark.parametrize("name", ["green", "colours:GREEN", "os:system", "os.path:join", "fedloom.config:Config"])
@pytest.mark.parametrize("allowed", [(), ("colours==1.1",), ("os==1.2", "colour==1.2")])
def test_only_allowed_packages_are_imported(folder: Path, name: str, allowed: tuple[str, ...]) -> None:
    install(folder, "colours", "1.2", SOURCE, {GROUP: {"green": "GREEN"}})
    allow_only(allowed)
    before = set(sys.modules)
    with pytest.raises(NotAllowedError, match="which is not allowed here"):
        COLOURS.get(name, "paint.colour")
    assert not {"colours", name.partition(":")[0]} & (set(sys.modules) - before)
    assert COLOURS["red"].hue == 0


@pytest.mark.parametrize("name", ["green", "colours:GREEN"])
def test_an_allowed_package_is_imported(folder: Path, name: str) -> None:
    install(folder, "colours", "1.2", SOURCE, {GROUP: {"green": "GREEN"}})
    allow_only(["colours==1.2"])
    assert COLOURS.get(name, "paint.colour").hue == 120


def test_an_import_path_is_followed_only_where_a_configuration_says_so(folder: Path) -> None:
    (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown colour 'mine:GREEN' \(allowed: red\)"):
        COLOURS["mine:GREEN"]
    assert "mine" not in sys.modules
