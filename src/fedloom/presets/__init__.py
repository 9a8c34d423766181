"""Experiments by name, and how the files that declare them are read.

A file holds what differs from the preset that it ``extends``, and ``about``, a line for people. A file with ``rows``
is a table: each row is a preset of its own, ``<file>/<row>``, or ``<file>/<base>/<row>`` for every base if the file has
``bases``. What else such a file holds is common to all of them, with the base's settings on top, and the row's on top
of both, but for a row that extends ``./other``: it goes on from that row, of the same base.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from fedloom.errors import ConfigError, unknown
from fedloom.settings import Settings, layered, read_toml

FOLDER = Path(__file__).parent
PAPERS = ("align-fl", "dp-cvae", "fission-flow", "fissionvae")
LISTED_BY = "'fedloom list presets' names them"  # too many for a sentence


def preset_names() -> list[str]:
    """The names of the presets that ship with the package, such as ``demo``."""
    return sorted(_declarations())


def starter_names() -> list[str]:
    """The presets to start from; the others are rows of papers' tables."""
    return [name for name in preset_names() if name.partition("/")[0] not in PAPERS]


def about_preset(name: str) -> str:
    """A line about a preset."""
    return str(_declarations()[name]["about"])


def read_settings(source: str | Path) -> Settings:
    """All that a preset, by its name, or a TOML file, by its path, sets or has from the presets that it extends."""
    if Path(source).suffix == ".toml":
        return _extended(read_toml(Path(source)), str(source))
    name = str(source)
    if name not in _declarations():
        raise ConfigError(unknown("preset", name, preset_names(), LISTED_BY) + "; a file must end in .toml")
    return _extended(_declarations()[name], name)


@cache
def _declarations() -> dict[str, Settings]:
    """Every preset as its file declares it."""
    files = ((path.relative_to(FOLDER).with_suffix("").as_posix(), path) for path in FOLDER.rglob("*.toml"))
    return {name: settings for file, path in files for name, settings in _declared(file, read_toml(path))}


def _declared(file: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The presets of one file by their names; each names its run after itself, unless it says otherwise."""
    rows: Settings = settings.pop("rows", {"": {}})
    bases: Settings = settings.pop("bases", {"": {}})
    for base, row in product(bases, rows):
        folder = "/".join(filter(None, (file, base)))
        name = "/".join(filter(None, (folder, row)))
        common, own = layered(settings, bases[base]), rows[row]
        if (other := own.get("extends", "")).startswith("./"):  # which has what is common already
            common, own = {}, {**own, "extends": folder + other.removeprefix(".")}
        titles = ", ".join(filter(None, (settings.get("about"), bases[base].get("about"))))
        about = ": ".join(filter(None, (titles, own.get("about"))))
        yield name, {"name": name.replace("/", "-"), **layered(common, own), "about": about}


def _extended(settings: Settings, origin: str) -> Settings:
    """Settings on top of those of the preset that they extend."""
    own = {key: value for key, value in settings.items() if key not in ("extends", "about")}
    if (base := settings.get("extends")) is None:
        return own
    if base not in _declarations():
        raise ConfigError(f"{origin}: extends: " + unknown("preset", str(base), preset_names(), LISTED_BY))
    return layered(_extended(_declarations()[base], base), own)
