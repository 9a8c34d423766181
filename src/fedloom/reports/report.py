"""Writing the report: the page, and its numbers as JSON beside it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import AuditConfig, DataConfig
from fedloom.discovery.grouping import with_groups
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.building import build_federation
from fedloom.federation.canaries import with_canaries
from fedloom.federation.records import Federation
from fedloom.reports.facts import facts_of
from fedloom.reports.findings import findings
from fedloom.reports.page import page
from fedloom.reports.panels import panels_of
from fedloom.reports.parts import Story
from fedloom.reports.pictures import data_uri, samples_of
from fedloom.reports.places import parents_of, without_places
from fedloom.reports.record_panels import real_records
from fedloom.reports.several_runs import comparison
from fedloom.reports.subject import ReportedRun, Subject, subject_of
from fedloom.runs.files import write_atomically
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams

SCHEMA = 1
SAMPLES_BUDGET = 3_000_000  # bytes of sample grids on a page, all runs together


def write_report(runs: Sequence[ReportedRun], out: Path, *, with_records: bool = False) -> None:
    """Write the page about one run, or several compared, to ``out``, and its numbers to the JSON file beside it.

    Records of silos that are not public are shown only ``with_records``, and then every page says so.
    """
    if out.suffix.lower() != ".html":
        raise ConfigError(f"--out = '{out}' must end in .html")
    stories = stories_of(runs, with_records=with_records)
    version, numbers = fedloom.__version__, out.with_suffix(".json")
    html = page(stories, version, numbers.name)
    found = {
        "schema": SCHEMA,
        "fedloom": version,
        "runs": [_numbers(story) for story in stories],
        "comparison": comparison(stories) if len(stories) > 1 else {},
    }
    write_atomically(numbers, json.dumps(_strict(found), indent=1, allow_nan=False).encode())
    # A lone half of a surrogate pair, from a hostile name, has no bytes in UTF-8.
    write_atomically(out, html.encode("utf-8", errors="replace"))


def stories_of(runs: Sequence[ReportedRun], *, with_records: bool = False) -> list[Story]:
    """Read all runs; those that describe the same data share them."""
    federations: dict[tuple[DataConfig, AuditConfig, int], Federation | str] = {}
    stories = []
    for run, label in zip(runs, _labels(runs), strict=True):
        config = run.folder.config
        key = (config.data, config.audit, config.seed)
        if key not in federations:
            federations[key] = federation_or_why(*key)
        subject = subject_of(run, in_groups(federations[key], run.folder), with_records=with_records)
        stories.append(_story(subject, label, SAMPLES_BUDGET // len(runs)))
    return stories


def _story(subject: Subject, label: str, budget: int) -> Story:
    facts = facts_of(subject, label)
    samples = samples_of(subject.run.folder.path, facts.groups, budget)
    real = {group: data_uri(image) for group, image in real_records(subject).items()}
    story = Story(facts, findings(facts), samples, panels_of(subject), real)
    if subject.is_public:
        return story
    parents = parents_of(subject.run.folder)
    panels = {
        name: replace(panel, missing=without_places(panel.missing, parents)) for name, panel in story.panels.items()
    }
    named = {part: without_places(getattr(story, part), parents) for part in ("facts", "findings")}
    return replace(story, panels=panels, **named)


def federation_or_why(data: DataConfig, audit: AuditConfig, seed: int) -> Federation | str:
    """What settings describe, or a sentence that says why it cannot be loaded."""
    try:
        return with_canaries(build_federation(data, Streams(seed)), audit, Streams(seed))
    except FedloomError as error:
        return str(error)


def in_groups(federation: Federation | str, folder: RunFolder) -> Federation | str:
    """The records in the groups that were found for a run, if any were looked for, or why they cannot be."""
    try:
        found = folder.discovery
        if found is None or isinstance(federation, str):
            return federation
        return with_groups(federation, found.groups, Streams(folder.config.seed))
    except FedloomError as error:
        return str(error)


def _labels(runs: Sequence[ReportedRun]) -> list[str]:
    """The folders' names, without their places; numbered where two of them have the same."""
    names = [run.folder.path.name for run in runs]
    return [f"{name} [{i}]" if Counter(names)[name] > 1 else name for i, name in enumerate(names, start=1)]


def _numbers(story: Story) -> dict[str, Any]:
    found = asdict(story.facts)
    found["metrics"] = {key: list(history.items()) for key, history in story.facts.metrics.items()}
    found["findings"] = [asdict(finding) for finding in story.findings]
    found["samples"] = {group: list(film) for group, film in story.samples.films.items()}
    found["panels"] = {
        name: {"numbers": panel.numbers, "missing": panel.missing} for name, panel in story.panels.items()
    }
    return found


def _strict(value: Any) -> Any:
    """The same value without what JSON has no word for: a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
