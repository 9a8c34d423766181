"""Where a release comes from, what may be said of it, and what stands against handing it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedloom.errors import ConfigError, RunFolderError, unknown
from fedloom.methods.generator import Generator
from fedloom.privacy.ledger import format_epsilon
from fedloom.release.standing import Worth, standing_of
from fedloom.runs.folder import RunFolder
from fedloom.runs.metrics import is_metric

FLAG = "--accept-risk"
THROWN_AWAY = "drawn from a secret of the operating system, which was thrown away when the run had ended"


class ReleasedRun(Protocol):
    """What a release asks of a run."""

    @property
    def folder(self) -> RunFolder:
        """The folder that the run lies in."""
        ...

    def generator(self) -> Generator:
        """The generators of the newest checkpoint."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a silo's policy allows to be spent on its data."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Provenance:
    """A finished run in plain values: what a card says of it."""

    name: str
    config: str  # its digest, whatever the seed
    method: str
    options: Mapping[str, Any]
    source: str  # of the records, by name
    rounds: int
    silos: int  # that sent something
    worth: Worth
    guarantee: str
    epsilon: float | None
    delta: float | None
    privacy: Mapping[str, str]  # the guarantee's parts, in words
    audit: tuple[str, ...]
    metrics: Mapping[str, float]
    objections: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "name": self.name,
            "config": self.config,
            "method": self.method,
            "rounds": self.rounds,
            "silos": self.silos,
            "worth": self.worth.value,
            "guarantee": self.guarantee,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "objections": list(self.objections),
        }


def provenance_of(folder: RunFolder, limits: Sequence[Limits] = ()) -> Provenance:
    """Read a finished run; ``limits`` are those of the silos whose data it learned from."""
    state = folder.status["state"]
    if state != "finished":
        hint = f"; 'fedloom resume {folder.path}' goes on with it" if state == "unfinished" else ""
        raise RunFolderError(f"{folder.path} is {state}, and only a finished run is handed on{hint}")
    config, rounds, data = folder.config, folder.rounds_done, folder.data_source
    standing = standing_of(folder)
    summary = standing.summary
    privacy = dict(summary.parts)
    if summary.epsilon is not None:
        privacy = {"promise": standing.promise, **privacy}
        privacy |= {} if folder.is_deployed else {"noise": THROWN_AWAY}
    return Provenance(
        name=config.name,
        config=config.digest_without_seed(),
        method=config.method.name,
        options=config.method.options,
        source=data.name,
        rounds=rounds,
        silos=len(participants(folder)),
        worth=standing.worth,
        guarantee=summary.guarantee,
        epsilon=summary.epsilon,
        delta=summary.delta,
        privacy=privacy,
        audit=_audit(folder.audit, rounds),
        metrics=_metrics(folder, rounds),
        objections=(
            *((standing.objection,) if standing.objection else ()),
            *((folder.not_for_release,) if folder.not_for_release else ()),
            *(("an audit refuted the epsilon that is claimed",) if folder.audit.get("refuted") else ()),
            *_beyond(limits, summary.epsilon, summary.delta or 0.0),
        ),
    )


def participants(folder: RunFolder) -> tuple[str, ...]:
    """The silos that sent something, in the order in which they did first."""
    return tuple(dict.fromkeys(row["silo"] for row in folder.egress()))


def pathway_of(generator: Generator, wanted: str = "") -> str:
    """The pathway asked for, or the first of the method's that can be walked for every group."""
    if wanted and wanted not in generator.method.pathways:
        raise ConfigError("--pathway: " + unknown("pathway", wanted, generator.method.pathways))
    open_ways = [name for name in generator.pathways if name == (wanted or name)]
    if not open_ways:
        raise ConfigError(
            f"method '{generator.method.name}' leaves nothing at the server that generates"
            + (f" along pathway '{wanted}'" if wanted else "")
        )
    return open_ways[0]


def check_risk(provenance: Provenance, folder: RunFolder, accepted: bool) -> None:
    """Refuse what something stands against, unless a person has said to go on."""
    if provenance.objections and not accepted:
        raise ConfigError(
            f"{folder.path} is not handed on ({'; '.join(provenance.objections)}); {FLAG} does it all the same, and "
            "the card says so"
        )


def _beyond(limits: Sequence[Limits], epsilon: float | None, delta: float) -> list[str]:
    """Which policies are not kept to."""
    found = []
    for limit in limits:
        allowed = f"a silo's policy allows epsilon {limit.epsilon:g} at delta {limit.delta:g}"
        if epsilon is None:
            found.append(f"{allowed}, and no epsilon is known")
        elif epsilon > limit.epsilon or delta > limit.delta:
            found.append(f"{allowed}, and epsilon {format_epsilon(epsilon)} at delta {delta:g} was spent")
    return found


def _audit(found: Mapping[str, Any], rounds: int) -> tuple[str, ...]:
    """What ``fedloom audit`` said last."""
    if not found:
        return ()
    other = () if found["round"] == rounds else (f"round {found['round']} was audited, and round {rounds} is released",)
    return (*other, *found["sentences"])


def _metrics(folder: RunFolder, rounds: int) -> dict[str, float]:
    """Those of the round that is released, without what is of a single silo."""
    found: dict[str, Any] = next((row for row in reversed(folder.metrics()) if row["round"] == rounds), {})
    found |= {row["key"]: row["value"] for row in folder.evaluations() if row["round"] == rounds}
    return {
        key: value for key, value in found.items() if is_metric(key) and "/silo=" not in key and "privacy/" not in key
    }
