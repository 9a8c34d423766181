"""What is known about a run, as plain values: all the numbers of the page, and of the JSON file beside it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedloom.errors import FedloomError
from fedloom.federation.building import describe
from fedloom.federation.records import Federation
from fedloom.methods.base import Method, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.privacy.summary import NONE, summarise
from fedloom.reports.audits import AuditFacts, read_audit
from fedloom.reports.downstream import DownstreamFacts, read_downstream
from fedloom.reports.health import SiloHealth, health_of
from fedloom.reports.logs import UNREADABLE, History, histories, read_rows
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import DIGEST, RunFolder

Found = TypeVar("Found")


class ReportedRun(Protocol):
    """What a report asks of a run."""

    @property
    def folder(self) -> RunFolder:
        """Where it lies."""
        ...

    def generator(self) -> Generator:
        """Its newest generators."""
        ...


@dataclass(frozen=True)
class Subject:
    """A run with its generators and its records, as far as they can be had; else a sentence that says why not."""

    run: ReportedRun
    generator: Generator | None
    no_generator: str
    federation: Federation | None
    no_records: str


def subject_of(run: ReportedRun, federation: Federation | str) -> Subject:
    """Open what a run left; ``federation`` is what its configuration describes, or why that cannot be loaded."""
    generator, why = None, ""
    try:
        generator = run.generator()
        for group in generator.groups:
            generator.model(group)  # a checkpoint of another model shows here
        made_with = load_checkpoint(run.folder.path).facts.get("federation")
    except FedloomError as error:
        why = str(error)
    except Exception as error:  # a damaged checkpoint may fail anywhere in torch; the rest of the page stands
        generator, why = None, f"the checkpoint does not fit this run ({type(error).__name__}: {error})"
    if isinstance(federation, str):
        return Subject(run, generator, why, None, f"the data cannot be loaded again: {federation}")
    if generator is not None and made_with != federation.digest:
        return Subject(run, generator, why, None, "the data that run.toml describes are not those it was trained on")
    return Subject(run, generator, why, federation, "")


@dataclass(frozen=True)
class SiloFacts:
    """One silo: what it holds (None and empty where its records are out of reach) and what left it."""

    name: str
    groups: tuple[str, ...]
    records: int | None
    classes: Mapping[str, int]
    rounds: int
    bytes: int
    blocks: tuple[str, ...]
    payloads: tuple[str, ...]


@dataclass(frozen=True)
class RunFacts:
    """A run in plain values."""

    label: str
    folder: str
    name: str
    method: str
    options: Mapping[str, Any]
    seed: int
    rounds_done: int
    rounds_planned: int
    status: Mapping[str, Any]
    modality: str  # of the records; empty where they could not be read
    shape: tuple[int, ...]
    groups: tuple[str, ...]
    classes: tuple[str, ...]
    silos: tuple[SiloFacts, ...]
    plan: Mapping[str, Mapping[str, Any]]
    payloads: Mapping[str, str]
    guarantee: str
    privacy: Mapping[str, Any]  # what the guarantee rests on, and every silo's account; empty without a mechanism
    parameters: Mapping[str, int]  # of each block, as the server holds it
    metrics: History
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    reproduce: str
    no_records: str  # why its records are out of reach; empty where they are not
    problems: tuple[str, ...]  # what of the folder could not be read
    audit: AuditFacts = field(default_factory=AuditFacts)
    not_for_release: str = ""
    downstream: DownstreamFacts = field(default_factory=DownstreamFacts)
    health: tuple[SiloHealth, ...] = ()  # of silos that are machines of their own


def facts_of(subject: Subject, label: str) -> RunFacts:
    """Read a run folder; whatever is damaged becomes a sentence in ``problems``."""
    folder, problems = subject.run.folder, []

    def rows(name: str) -> list[dict[str, Any]]:
        try:
            return read_rows(folder.path / name)
        except UNREADABLE as error:
            problems.append(f"{name} cannot be read ({type(error).__name__})")
            return []

    def mapping(name: str) -> dict[str, Any]:
        path = folder.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except UNREADABLE as error:
            problems.append(f"{name} cannot be read ({type(error).__name__})")
            return {}
        return _two_levels(found) if isinstance(found, dict) else {}

    def read(name: str, reader: Callable[[Path], Found], nothing: Found) -> Found:
        try:
            return reader(folder.path / name)
        except UNREADABLE as error:
            problems.append(f"{name} cannot be read ({type(error).__name__})")
            return nothing

    config, method = folder.config, _method(subject)
    attacked = read("audit.json", read_audit, AuditFacts())
    heads = read("downstream.json", read_downstream, DownstreamFacts())
    privacy = _privacy(folder, problems)
    egress = rows("egress.jsonl")
    later = [{"round": row["round"], str(row.get("key")): row.get("value")} for row in rows("evaluations.jsonl")]
    history = histories([*rows("metrics.jsonl"), *later])
    asked = [row for row in rows("silos.jsonl") if row.get("event") == "asked"]  # of a deployment, retries and all
    traffic = {"bytes": _bytes_by_round(egress), "bytes_down": _bytes_by_round(asked)}
    history |= {key: values for key, values in traffic.items() if values}
    setting = subject.federation or subject.generator
    options = {key: value for key, value in config.to_mapping()["method"].items() if key != "name"}
    return RunFacts(
        label=label,
        folder=str(folder.path),
        name=config.name,
        method=config.method.name,
        options=options,
        seed=config.seed,
        rounds_done=folder.rounds_done,
        rounds_planned=config.rounds,
        status={"state": "unfinished", "round": folder.rounds_done, "reason": "", **mapping("status.json")},
        modality=subject.federation.modality.name if subject.federation else "",
        shape=subject.federation.shape if subject.federation else (),
        groups=setting.groups if setting else (),
        classes=subject.federation.classes if subject.federation else (),
        silos=_silos(subject.federation, egress),
        plan=_plan(method) if method else {},
        payloads={payload.name: payload.cost for payload in method.plan.payloads} if method else {},
        guarantee=privacy.get("guarantee", NONE if method else ""),
        privacy=privacy,
        parameters=_parameters(subject.generator) if subject.generator else {},
        metrics=history,
        environment={name: value for name, value in mapping("environment.json").items() if name != DIGEST},
        config=config.to_mapping(),
        reproduce=shlex.join(["fedloom", "run", str(folder.path / "run.toml"), "--out", f"{folder.path}-again"]),
        no_records=subject.no_records,
        problems=tuple(problems),
        audit=attacked,
        not_for_release=folder.not_for_release,
        downstream=heads,
        health=health_of(rows("silos.jsonl")),
    )


def _privacy(folder: RunFolder, problems: list[str]) -> dict[str, Any]:
    """What the settings and the ledger say, where a mechanism was asked for."""
    settings = folder.config.privacy
    if settings.mechanism == "none":
        return {}
    try:
        return summarise(settings, folder.ledger).to_mapping()
    except FedloomError as error:
        problems.append(str(error))
    except Exception as error:  # a stranger's ledger may hold anything where events and budgets stand
        problems.append(f"{folder.ledger.name} cannot be read ({type(error).__name__})")
    return {"guarantee": "no DP guarantee: the ledger cannot be read"}


def _method(subject: Subject) -> Method | None:
    """The method, from the checkpoint or, before the first one, from the data."""
    if subject.generator is not None:
        return subject.generator.method
    if subject.federation is None:
        return None
    try:
        return make_method(Setting.of(subject.run.folder.config, subject.federation))
    except FedloomError:
        return None


def _two_levels(found: Mapping[str, Any]) -> dict[str, Any]:
    """Single values, and those of tables as ``table.key``; whatever lies deeper is nothing that fedloom writes."""
    plain = {key: value for key, value in found.items() if isinstance(value, str | int | float)}
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    for key, table in tables.items():
        plain |= {f"{key}.{name}": value for name, value in table.items() if isinstance(value, str | int | float)}
    return plain


def _plan(method: Method) -> dict[str, dict[str, Any]]:
    rules = method.plan.blocks.items()
    return {block: {"scope": str(rule.scope), "up": rule.up, "down": str(rule.down)} for block, rule in rules}


def _parameters(generator: Generator) -> dict[str, int]:
    blocks = generator.server.blocks.items()
    return {str(key): sum(tensor.numel() for tensor in tensors.values()) for key, tensors in blocks}


def _bytes_by_round(log: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    total: dict[int, float | None] = {}
    for row in log:
        total[row["round"]] = (total.get(row["round"]) or 0) + _count(row.get("bytes"))
    return total


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _silos(federation: Federation | None, egress: list[dict[str, Any]]) -> tuple[SiloFacts, ...]:
    """Every silo of the federation, and every one that the egress log names."""
    held = {summary.name: summary for summary in describe(federation)} if federation else {}
    sent: dict[str, list[dict[str, Any]]] = {name: [] for name in held}
    for row in egress:
        if isinstance(row.get("silo"), str):
            sent.setdefault(row["silo"], []).append(row)
    found = []
    for name, rows in sent.items():
        summary = held.get(name)
        blocks = _names(row.get("blocks") for row in rows)
        found.append(
            SiloFacts(
                name=name,
                groups=summary.groups if summary else _groups_in(blocks),
                records=summary.records if summary else None,
                classes=summary.classes if summary else {},
                rounds=len({row["round"] for row in rows}),
                bytes=sum(_count(row.get("bytes")) for row in rows),
                blocks=blocks,
                payloads=_names(row.get("payloads") for row in rows),
            )
        )
    return tuple(found)


def _names(columns: Iterable[Any]) -> tuple[str, ...]:
    """Each name that occurs in some lists or mappings, once, in the order met."""
    names = (name for column in columns if isinstance(column, list | dict) for name in column)
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def _groups_in(blocks: Iterable[str]) -> tuple[str, ...]:
    """Groups that a silo's blocks name: ``decoder@group=mnist``."""
    return tuple(dict.fromkeys(block.partition("@group=")[2] for block in blocks if "@group=" in block))
