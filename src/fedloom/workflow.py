"""All that people do with runs and data, from Python: the commands' work, called as functions.

A run is given as what :func:`fedloom.train` returned, or as its folder; places are texts or paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError
from fedloom.experiment import Observer, Run, load, torch_device
from fedloom.federation.records import Federation
from fedloom.settings import parse

if TYPE_CHECKING:
    from fedloom.certificate.facts import Certificate
    from fedloom.sweep import Outcome, Trial

RunLike = Run | Path | str


def run_of(run: RunLike) -> Run:
    """A run by itself, or by its folder."""
    return run if isinstance(run, Run) else load(run)


def evaluate(
    run: RunLike,
    *,
    metrics: Sequence[str] = (),
    samples: int = 0,
    federation: Federation | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """Measure a run's newest checkpoint by its own metrics, or by others; what is found is kept in its folder."""
    found = run_of(run)
    own = found.config.evaluation
    chosen = replace(own, metrics=tuple(metrics) or own.metrics, samples=samples or own.samples)
    return found.evaluate(settings=parse(type(own), vars(chosen), "evaluation"), federation=federation, device=device)


def audit_run(
    run: RunLike, *, attacks: Sequence[str] = (), federation: Federation | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Attack a run by all that applies, or by the attacks named, and set what is found beside what it claims."""
    from fedloom.audit import audit_run as audited

    found = run_of(run)
    return audited(found, attacks=attacks, federation=federation or found.federation, device=device)


def embed(
    data: str | Path,
    out: str | Path,
    *,
    backbone: str = "efficientnet-lite0",
    projection: str = "none",
    dimension: int = 256,
    path: str | Path = "",
    device: str = "cpu",
) -> dict[str, Any]:
    """Write the vectors of a frozen public network for a data set's images, or for those of a folder or .npz file."""
    from fedloom import embedding
    from fedloom.backbones.catalogue import load_backbone
    from fedloom.federation.archives import cache_folder

    network = load_backbone(backbone, device=torch_device(device))
    preparation = embedding.Preparation(projection, dimension)
    dataset = embedding.images_of(str(data), str(path))
    return embedding.embed(dataset, network, preparation, Path(out), cache_folder() / "features")


def synthesize(
    run: RunLike,
    out: str | Path,
    records: int,
    *,
    form: str = "folder",
    labels: str = "",
    seed: int = 0,
    licence: str = "unknown",
    accept_risk: bool = False,
) -> dict[str, Any]:
    """Write a synthetic data set with its card into a new folder, and return what it holds."""
    from fedloom.release.synthesis import SynthesisOrder
    from fedloom.release.synthesis import synthesize as made

    order = SynthesisOrder(records=records, form=form, labels=labels, seed=seed, licence=licence)
    return made(run_of(run), Path(out), order, accept_risk=accept_risk)


def certify(run: RunLike, out: str | Path = "", *, approvals: Sequence[str] = ()) -> Certificate:
    """Write what a finished run promises, as HTML, PDF and JSON; each approval is "name, role, date"."""
    from fedloom.certificate.making import make_certificate
    from fedloom.certificate.matter import Approval

    folder = run_of(run).folder
    place = Path(out) if out else folder.path / "certificate"
    return make_certificate(folder, place, [Approval.of(text) for text in approvals])


def report(runs: RunLike | Sequence[RunLike], out: str | Path = "", *, with_records: bool = False) -> Path:
    """Write one page about a run, or about several compared, and return where it is."""
    from fedloom.reports.report import write_report

    found = [run_of(runs)] if isinstance(runs, Run | Path | str) else [run_of(run) for run in runs]
    if not found:
        raise ConfigError("there are no runs to report; give one or more")
    file = Path(out) if out else found[0].folder.path / "report.html" if len(found) == 1 else Path("report.html")
    write_report(found, file, with_records=with_records)
    return file


def run_sweep(file: str | Path, out: str | Path, *, observer: Observer | None = None) -> dict[str, Outcome]:
    """Run every combination of a sweep file, each into a folder of its own; what has ended is not run again."""
    from fedloom.sweep import read_sweep
    from fedloom.sweep import run_sweep as run_all

    @contextlib.contextmanager
    def observe(_packed: Sequence[Trial]) -> Iterator[Observer]:
        yield observer or Observer()

    return run_all(read_sweep(Path(file)), Path(out), observe)
