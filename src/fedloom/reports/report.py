"""Writing the report: the page, and its numbers as JSON beside it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import AuditConfig, DataConfig
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.building import build_federation
from fedloom.federation.canaries import with_canaries
from fedloom.federation.records import Federation
from fedloom.reports.facts import ReportedRun, facts_of, subject_of
from fedloom.reports.findings import findings
from fedloom.reports.page import page
from fedloom.reports.panels import panels_of
from fedloom.reports.parts import Story
from fedloom.reports.pictures import samples_of
from fedloom.reports.several_runs import comparison
from fedloom.runs.files import write_atomically
from fedloom.streams import Streams

SCHEMA = 1
SAMPLES_BUDGET = 3_000_000  # bytes of sample grids on a page, all runs together


def write_report(runs: Sequence[ReportedRun], out: Path) -> None:
    """Write the page about one run, or several compared, to ``out``, and its numbers to the JSON file beside it."""
    if out.suffix.lower() != ".html":
        raise ConfigError(f"--out = '{out}' must end in .html")
    stories, version, numbers = stories_of(runs), fedloom.__version__, out.with_suffix(".json")
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


def stories_of(runs: Sequence[ReportedRun]) -> list[Story]:
    """Read all runs; those that describe the same data share them."""
    federations: dict[tuple[DataConfig, AuditConfig, int], Federation | str] = {}
    stories = []
    for run, label in zip(runs, _labels(runs), strict=True):
        config = run.folder.config
        key = (config.data, config.audit, config.seed)
        if key not in federations:
            federations[key] = _federation(*key)
        subject = subject_of(run, federations[key])
        facts = facts_of(subject, label)
        samples = samples_of(run.folder.path, facts.groups, SAMPLES_BUDGET // len(runs))
        stories.append(Story(facts, findings(facts), samples, panels_of(subject)))
    return stories


def _federation(data: DataConfig, audit: AuditConfig, seed: int) -> Federation | str:
    try:
        return with_canaries(build_federation(data, Streams(seed)), audit, Streams(seed))
    except FedloomError as error:
        return str(error)


def _labels(runs: Sequence[ReportedRun]) -> list[str]:
    """The folders' names; whole paths where two of them have the same, numbers where even these are equal."""
    names = [run.folder.path.name for run in runs]
    paths = [str(run.folder.path) for run in runs]
    labels = [path if Counter(names)[name] > 1 else name for name, path in zip(names, paths, strict=True)]
    return [f"{label} [{i}]" if Counter(labels)[label] > 1 else label for i, label in enumerate(labels, start=1)]


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
