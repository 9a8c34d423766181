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

import contextlib
import functools
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedloom.cluster import Cluster, JobCall
from fedloom.config import Config, load_config
from fedloom.engines.choice import device_of, make_pack, silos_per_round
from fedloom.engines.fused import CUDA_CHUNK
from fedloom.engines.fused_stack import kinds_of, together
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning, RunFolderError, unknown
from fedloom.experiment import Experiment, Observer, RunLoop, file_name, resume, run_together, train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.runs.files import digest, explained, write_json
from fedloom.runs.folder import RunFolder
from fedloom.settings import read_toml
from fedloom.streams import Streams

KEYS = {"base", "grid", "variant"}
VARIANT_KEYS = {"name", "overrides"}
MOST_PACKED = 16  # runs: each keeps its data and its evaluation on the host
KEPT_FEDERATIONS = 8
Flat = dict[str, Any]  # dotted key -> value
Pack = Literal["auto"] | int  # how many runs train in one program at most; 1: each alone


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

    @classmethod
    def of(cls, error: Exception) -> Outcome:
        """A failure, while its error is being handled."""
        if isinstance(error, FedloomError):
            return cls("failed", str(error))
        return cls("failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def read_sweep(path: Path) -> list[Trial]:
    """Every trial that a sweep file describes; all settings are checked before the first one runs."""
    found = read_toml(path)
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


def pack_of(text: str) -> Pack:
    """``auto``, ``off`` or a number, as a person says it."""
    if text in ("auto", "off"):
        return "auto" if text == "auto" else 1
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError(f"--pack = '{text}' must be auto, off or a number of at least 2")
    return int(text)


def run_sweep(
    trials: Sequence[Trial],
    out: Path,
    observe: Callable[[Sequence[Trial]], AbstractContextManager[Observer]],
    pack: Pack = "auto",
) -> dict[str, Outcome]:
    """Run or resume every trial that has not ended; a trial that fails is recorded, and the sweep goes on."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    federations = Federations()
    for packed in packs_of(trials, out, pack, federations):
        with observe(packed) as observer:
            outcomes |= train_pack(packed, out, observer, federations)
        _record(out, trials, outcomes)
    return {trial.name: outcomes[trial.name] for trial in trials}


def sweep_on(
    cluster: Cluster, trials: Sequence[Trial], out: Path, pack: Pack, say: Callable[[str], None]
) -> dict[str, Outcome]:
    """The same by jobs, one for each pack; only what has not ended is asked for."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    missing = [trial for trial in trials if not _over(trial, out / trial.name)]
    packs = packs_of(missing, out, pack, Federations())
    calls = [JobCall(tuple(trial.name for trial in packed), partial(_job, packed, out.resolve())) for packed in packs]
    came = cluster.carry_out(calls, say)
    outcomes = {}
    for trial in trials:
        status = {"state": "unfinished", "reason": ""}
        if _over(trial, out / trial.name):
            status = RunFolder.open(out / trial.name).status
        found = came.get(trial.name, {})
        failed = found.get("state") == "failed"
        outcomes[trial.name] = Outcome(**found) if failed else Outcome(status["state"], status["reason"])
    _record(out, trials, outcomes)
    return outcomes


def _job(trials: Sequence[Trial], out: Path) -> dict[str, dict[str, str]]:
    """What a job does: a pack of trials."""
    outcomes = train_pack(trials, out, Observer(), Federations())
    return {name: asdict(outcome) for name, outcome in outcomes.items()}


def _record(out: Path, trials: Sequence[Trial], outcomes: Mapping[str, Outcome]) -> None:
    """Write down how trials have ended so far."""
    record = {trial.name: asdict(outcomes[trial.name]) for trial in trials if trial.name in outcomes}
    write_json(out / "sweep.json", {"trials": record})


def train_pack(trials: Sequence[Trial], out: Path, observer: Observer, federations: Federations) -> dict[str, Outcome]:
    """Run or resume trials in one program, as far as that goes."""
    if len(trials) > 1:
        _train_together(trials, out, observer, federations)
    # What ended in a pack is only read here; what it left unfinished goes on alone.
    return {trial.name: _outcome(trial, out / trial.name, observer) for trial in trials}


def packs_of(trials: Sequence[Trial], out: Path, pack: Pack, federations: Federations) -> list[list[Trial]]:
    """Which trials train in one program: those whose silos are of the same kinds; the others one by one."""
    keyed = []
    for trial in trials:
        size = 1
        alike: object = trial.name  # like no other
        # What is wrong with a trial is said when its turn comes.
        with contextlib.suppress(FedloomError):
            if _packable(trial.config, pack) and not _over(trial, out / trial.name):
                trainer = federations.experiment(trial.config).trainer
                if trainer.method.phases:  # or there is nothing to batch
                    size = pack_limit(trainer, pack)
                    alike = trial.config.engine, [kind for kind, _ in kinds_of(trainer)]
        keyed.append(((size, alike), trial))
    packs = [same[i : i + size] for (size, _), same in together(keyed) for i in range(0, len(same), size)]
    return sorted(packs, key=lambda found: trials.index(found[0]))


def _packable(config: Config, pack: Pack) -> bool:
    """Whether packing is wanted, and the engine will be the fused one, which knows no private pretraining.

    By itself a sweep packs only on a GPU: on a CPU a larger stack falls out of the cache.
    """
    if pack == 1 or config.privacy.pretraining:
        return False
    on_gpu = device_of(config.engine).type == "cuda"
    return (config.engine.name == "fused" and (on_gpu or pack != "auto")) or (config.engine.name == "auto" and on_gpu)


def pack_limit(trainer: Trainer, pack: Pack) -> int:
    """How many runs like this one go together: by itself as many as fill the program with silos."""
    return pack if pack != "auto" else max(1, min(CUDA_CHUNK // silos_per_round(trainer), MOST_PACKED))


class Federations:
    """The data of the latest trials: runs of one source and seed share them."""

    def __init__(self) -> None:
        self._built = functools.lru_cache(maxsize=KEPT_FEDERATIONS)(build_federation)

    def data(self, config: Config) -> Federation:
        """A trial's records, in silos; the experiment pools them where the layout is centralised."""
        return self._built(replace(config.data, layout="federated"), Streams(config.seed))

    def experiment(self, config: Config) -> Experiment:
        """The experiment of a trial, on data that trials share."""
        return Experiment.of(config, self.data(config))


def _train_together(trials: Sequence[Trial], out: Path, observer: Observer, federations: Federations) -> None:
    """Train in one program as far as that goes; a trial that cannot go on leaves the others running."""
    loops: dict[str, RunLoop] = {}
    for trial in trials:
        # What is wrong with a trial is said when it is tried alone.
        with contextlib.suppress(FedloomError):
            folder, experiment = out / trial.name, federations.experiment(trial.config)
            begun = _begun(trial, folder)
            loops[trial.name] = experiment.take_up(begun, observer) if begun else experiment.begin(folder, observer)
    if len(loops) < 2:
        return
    names, runs = list(loops), list(loops.values())
    try:
        trainers = [loop.experiment.trainer for loop in runs]
        engine = make_pack(trainers, runs[0].earlier_choice)
        try:
            failures = run_together(runs, engine, engine.rounds)
        finally:
            engine.close()
    except Exception as error:
        warnings.warn(f"the pack of {', '.join(names)} broke up: {error}", FedloomWarning, stacklevel=3)
        return
    for run, failure in failures.items():
        warnings.warn(f"{names[run]} left its pack: {failure}", FedloomWarning, stacklevel=3)


def _outcome(trial: Trial, folder: Path, observer: Observer) -> Outcome:
    try:
        status = _ended(trial, folder, observer)
    except Exception as error:
        return Outcome.of(error)
    return Outcome(status["state"], status["reason"])


def _ended(trial: Trial, folder: Path, observer: Observer) -> dict[str, Any]:
    """The status of a trial's run once it has ended: it may have before, or has to be resumed or begun."""
    begun = _begun(trial, folder)
    if begun is None:
        return train(trial.config, folder, observer=observer).folder.status
    return resume(folder, observer=observer).folder.status if begun.status["state"] == "unfinished" else begun.status


def _begun(trial: Trial, folder: Path) -> RunFolder | None:
    """A trial's run folder, if it has one."""
    if not (folder / "run.toml").is_file():
        return None
    begun = RunFolder.open(folder)
    if begun.config.digest() != trial.config.digest():
        raise RunFolderError(f"{folder} holds a run with other settings; choose another --out")
    return begun


def _over(trial: Trial, folder: Path) -> bool:
    begun = _begun(trial, folder)
    return begun is not None and begun.status["state"] != "unfinished"


def _trial(source: str | Path, variant: str, overrides: Flat, point: Flat, varied: Sequence[str]) -> Trial:
    """One combination; it is called by its variant and by what varies in the grid."""
    config = load_config(source, changes=_nested({**overrides, **point}))
    config.privacy.check_mechanism()
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
