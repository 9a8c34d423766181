"""Sweeps: one experiment in many variants and seeds, each in a folder of its own, resumed where they stopped.

base = "demo"                        a preset, or a file beside this one
[grid]                               every combination of these values
method.name = ["fedvae", "fissionvae"]
seed = [1, 2, 3]
[[variant]]                          optional: each of these with every combination
name = "wave"
overrides.method.prior = "wave"
"""

from __future__ import annotations

import itertools
import json
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom.config import Config, load_config
from fedloom.errors import ConfigError, FedloomError, RunFolderError, unknown
from fedloom.experiment import Observer, file_name, resume, train
from fedloom.runs.files import digest, explained, write_atomically
from fedloom.runs.folder import RunFolder

KEYS = {"base", "grid", "variant"}
VARIANT_KEYS = {"name", "overrides"}
Flat = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    config: Config


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: ``finished``, ``diverged``, or ``failed`` with what went wrong."""

    state: str
    reason: str = ""
    trace: str = ""  # only where the failure was nobody's mistake


def read_sweep(path: Path) -> list[Trial]:
    """Every trial that a sweep file describes; all settings are checked before the first one runs."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    _check_keys(found, KEYS, path, "key")
    base = found.get("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r} must be the name of a preset or a file that ends in .toml")
    source = path.parent / base if base.endswith(".toml") else base
    grid = _grid(found.get("grid", {}), path)
    varied = [key for key, values in grid.items() if len(values) > 1]
    combinations = [
        _trial(source, name, overrides, dict(zip(grid, values, strict=True)), varied)
        for name, overrides in _variants(found.get("variant", []), path)
        for values in itertools.product(*grid.values())
    ]
    return _distinct(combinations)


def run_sweep(
    trials: Sequence[Trial],
    out: Path,
    observe: Callable[[int, Trial], AbstractContextManager[Observer]],
) -> dict[str, Outcome]:
    """Run or resume every trial that has not ended; a trial that fails is recorded, and the sweep goes on."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for number, trial in enumerate(trials, start=1):
        with observe(number, trial) as observer:
            outcomes[trial.name] = _outcome(trial, out / trial.name, observer)
        record = {name: asdict(outcome) for name, outcome in outcomes.items()}
        write_atomically(out / "sweep.json", json.dumps({"trials": record}, indent=2).encode())
    return outcomes


def _outcome(trial: Trial, folder: Path, observer: Observer) -> Outcome:
    try:
        status = _ended(trial, folder, observer)
    except FedloomError as error:
        return Outcome("failed", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome(status["state"], status["reason"])


def _ended(trial: Trial, folder: Path, observer: Observer) -> dict[str, Any]:
    """The status of a trial's run once it has ended: it may have before, or has to be resumed or begun."""
    if not (folder / "run.toml").is_file():
        return train(trial.config, folder, observer=observer).folder.status
    begun = RunFolder.open(folder)
    if begun.config.digest() != trial.config.digest():
        raise RunFolderError(f"{folder} holds a run with other settings; choose another --out")
    return resume(folder, observer=observer).folder.status if begun.status["state"] == "unfinished" else begun.status


def _trial(source: str | Path, variant: str, overrides: Flat, point: Flat, varied: Sequence[str]) -> Trial:
    """One combination; it is called by its variant and by what varies in the grid."""
    config = load_config(source, changes=_nested({**overrides, **point}))
    leaves = Counter(key.rpartition(".")[2] for key in point)
    parts = [variant] if variant else []
    for key in sorted(varied, key=lambda key: key == "seed"):  # the seed comes last
        leaf = key.rpartition(".")[2]
        label = "" if key == "method.name" else f"{leaf if leaves[leaf] == 1 else key}-"
        parts.append(label + _text(point[key]))
    return Trial(file_name("-".join(parts)) or file_name(config.name), config)


def _distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Trials whose names coincide get a hash of their settings behind the name; equal trials are refused."""
    digests = [digest(trial.config.to_toml().encode()) for trial in trials]
    names, settings = Counter(trial.name for trial in trials), Counter(digests)
    for trial, found in zip(trials, digests, strict=True):
        if settings[found] > 1:
            raise ConfigError(f"two trials of the sweep have the same settings; one of them is '{trial.name}'")
    return [
        Trial(f"{trial.name}-{found[:8]}", trial.config) if names[trial.name] > 1 else trial
        for trial, found in zip(trials, digests, strict=True)
    ]


def _grid(found: Any, path: Path) -> dict[str, list[Any]]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: grid = {found!r} must be a table of lists")
    grid = _flat(found)
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} = {values!r} must be a list of at least one value")
    return grid


def _variants(found: Any, path: Path) -> list[tuple[str, Flat]]:
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise ConfigError(f"{path}: variant must be written as [[variant]] tables with a name and overrides")
    variants = []
    for item in found:
        _check_keys(item, VARIANT_KEYS, path, "variant key")
        name, overrides = item.get("name"), item.get("overrides", {})
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{path}: variant.name = {name!r} must be a text")
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"{path}: variant.overrides = {overrides!r} must be a table of settings")
        variants.append((name, _flat(overrides)))
    return variants or [("", {})]


def _check_keys(found: Mapping[str, Any], allowed: set[str], path: Path, kind: str) -> None:
    for key in found:
        if key not in allowed:
            raise ConfigError(f"{path}: " + unknown(kind, key, allowed))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested tables as dotted keys; a quoted dotted key is one already."""
    found: Flat = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _nested(flat: Flat) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _text(value: Any) -> str:
    return "-".join(map(_text, value)) if isinstance(value, list) else str(value).lower()
