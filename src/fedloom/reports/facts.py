"""What is known about a run, as plain values: all the numbers of the page, and of the JSON file beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.errors import FedloomError
from fedloom.evaluation.metric import is_of_records
from fedloom.federation.building import describe
from fedloom.federation.records import Federation
from fedloom.methods.base import Method, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.summary import NONE
from fedloom.reports.audits import AuditFacts, read_audit
from fedloom.reports.downstream import DownstreamFacts, read_downstream
from fedloom.reports.health import SiloHealth, health_of
from fedloom.reports.logs import History, histories
from fedloom.reports.reading import FolderReader
from fedloom.reports.subject import Subject
from fedloom.reports.verdict import Judged, Verdict, read_judged, verdict_of
from fedloom.runs.discoveries import Discovery
from fedloom.runs.folder import DIGEST, DISCOVERY, RunFolder
from fedloom.runs.metrics import family_of


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
    verdict: Verdict
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
    discovery: Discovery | None = None  # groups that nobody named
    health: tuple[SiloHealth, ...] = ()  # of silos that are machines of their own
    judged: Judged = field(default_factory=Judged)  # the numbers that the verdict goes by
    outside_guarantee: tuple[str, ...] = ()  # kinds of numbers that were computed from records and are not charged
    public: bool = False  # whether everybody has the records
    with_records: bool = False  # whether records that are not public are shown nevertheless


def facts_of(subject: Subject, label: str) -> RunFacts:
    """Read a run folder; whatever is damaged becomes a sentence in ``problems``."""
    folder, method, held = subject.run.folder, _method(subject), subject.federation
    files = FolderReader(folder)
    config, setting, egress = folder.config, held or subject.generator, files.rows("egress.jsonl")
    settings, privacy = config.to_mapping(), files.privacy()
    metrics = _history(files, egress)
    return RunFacts(
        label=label,
        folder=str(folder.path),
        name=config.name,
        method=config.method.name,
        options={key: value for key, value in settings["method"].items() if key != "name"},
        seed=config.seed,
        rounds_done=folder.rounds_done,
        rounds_planned=config.rounds,
        status={"state": "unfinished", "round": folder.rounds_done, "reason": "", **files.mapping("status.json")},
        verdict=verdict_of(folder),
        judged=files.read("verdict.json", read_judged, Judged()),
        modality=held.modality.name if held else "",
        shape=held.shape if held else (),
        groups=setting.groups if setting else (),
        classes=held.classes if held else (),
        silos=_silos(held, egress, with_classes=subject.shows_records),
        plan=_plan(method) if method else {},
        payloads={payload.name: payload.cost for payload in method.plan.payloads} if method else {},
        guarantee=privacy.get("guarantee", NONE if method else ""),
        privacy=privacy,
        outside_guarantee=tuple(dict.fromkeys(family_of(key) for key in metrics if is_of_records(key))),
        public=subject.is_public,
        with_records=subject.with_records and not subject.is_public,
        parameters=_parameters(subject.generator) if subject.generator else {},
        metrics=metrics,
        environment={name: value for name, value in files.mapping("environment.json").items() if name != DIGEST},
        config=settings,
        reproduce=shlex.join(["fedloom", "run", str(folder.path / "run.toml"), "--out", f"{folder.path}-again"]),
        no_records=subject.no_records,
        audit=files.read("audit.json", read_audit, AuditFacts()),
        not_for_release=folder.not_for_release,
        downstream=files.read("downstream.json", read_downstream, DownstreamFacts()),
        discovery=files.read(DISCOVERY, lambda _: _discovery(folder), None),
        health=health_of(files.rows("silos.jsonl")),
        problems=tuple(files.problems),
    )


def _discovery(folder: RunFolder) -> Discovery | None:
    try:
        return folder.discovery
    except FedloomError as error:
        raise ValueError from error


def _history(files: FolderReader, egress: list[dict[str, Any]]) -> History:
    """Every number by its key: of the run, of later evaluations, and what passed in each round."""
    later = [{"round": row["round"], str(row.get("key")): row.get("value")} for row in files.rows("evaluations.jsonl")]
    found = histories([*files.rows("metrics.jsonl"), *later])
    asked = [
        row for row in files.rows("silos.jsonl") if row.get("event") == "asked"
    ]  # of a deployment, retries and all
    traffic = {"bytes": _bytes_by_round(egress), "bytes_down": _bytes_by_round(asked)}
    return found | {key: values for key, values in traffic.items() if values}


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


def _silos(federation: Federation | None, egress: list[dict[str, Any]], *, with_classes: bool) -> tuple[SiloFacts, ...]:
    """Every silo of the federation, and every one that the egress log names.

    How many records of each class a silo has is nobody's business where they are not public: few give somebody away.
    """
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
                classes=summary.classes if summary and with_classes else {},
                rounds=len({row["round"] for row in rows} - {BEFORE}),
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
