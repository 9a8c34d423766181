"""ALIGN-FL's tables and what lifts them, on full data: each row trained and measured by both protocols.

All seeds of a row train in one program, and several rows run at once, each in its own process, because one hardly
fills a GPU. The data must be in FEDLOOM_DATA.

    python benchmarks/align_fl.py --plan noise.json                     # noise of the private rows; needs dp-accounting
    python benchmarks/align_fl.py --set tables --seeds 0 1 2 --noise noise.json --name align_fl-tables
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from common import keep
from fedloom.config import Config, load_config
from fedloom.engines.base import FederationState, Job, initial_state, participants_of
from fedloom.engines.choice import device_of
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.evaluation.auditing import Audit, Effort, outliers
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment, KeptModels
from fedloom.federation.rounds import RoundContext
from fedloom.methods.generator import Generator

METRICS = ("probe", "frechet", "frechet-paper", "spread", "manifold")
GRID, CODES = 64, 2000
PICTURES = ("samples", "exposed", "codes")


@dataclass(frozen=True)
class Row:
    """A preset and what is changed of it."""

    preset: str
    changes: tuple[str, ...] = ()

    def config(self, seed: int, noise: dict[str, float], more: Sequence[str] = ()) -> Config:
        config = load_config(f"align-fl/{self.preset}", [*self.changes, f"seed={seed}", "engine.name=fused", *more])
        if config.privacy.mechanism == "none" or self.label not in noise:
            return config
        # The accountant may be missing where the GPU is: noise planned elsewhere, spending counted afterwards.
        return replace(config, privacy=replace(config.privacy, epsilon=0.0, noise_multiplier=noise[self.label]))

    @property
    def label(self) -> str:
        return " ".join((self.preset, *self.changes))


def rows_of(*presets: str, changes: Sequence[str] = ()) -> list[Row]:
    return [Row(preset, tuple(changes)) for preset in presets]


TABLES = rows_of(
    *("table2/mnist/no-dp", "table2/mnist/dp-sgd", "table2/mnist/lcd-vae"),
    *("table3/fedavg", "table3/fedprox", "table3/moon", "table3/contrast-avg-synth", "table3/contrast-synth-only"),
    *("variants/centralised", "variants/one-shot"),
)
VARIANTS = rows_of("variants/dp-sgd-decoder", "variants/certified", "variants/dp-sgd-certified", "variants/silo-only")
# The other points of both figures are rows of table II.
FIGURES = rows_of(
    *(f"figure4/mnist/epsilon-{epsilon}" for epsilon in (1, 5, 15, 20)),
    *(f"figure5/mnist/penalty-{weight}" for weight in (0.01, 0.05, 0.1, 0.5)),
)
FASHION = rows_of("table2/fashion-mnist/no-dp", "table2/fashion-mnist/dp-sgd", "table2/fashion-mnist/lcd-vae")
WIDE = ("model.latent=16", "model.likelihood=bernoulli")
FRESH = ("server.samples=50000", "server.epochs=1")
RICH = (*WIDE, "server.model.latent=2", "server.model.likelihood=gaussian")  # of the silos' networks alone
# The server's model has two latents and as many updates as the centralised one.
TWO = [
    Row("mnist", FRESH),
    Row("mnist", (*RICH, *FRESH)),
    Row("mnist", ("server.latents=histogram", *FRESH)),
    Row("mnist", ("server.keep_optimizer=true",)),
    Row("mnist", ("model.kl_weight=0.5",)),
    Row("variants/centralised", ("model.kl_weight=0.5",)),
    Row("mnist", ("server.replay=4", "server.samples=1000")),
    Row("mnist", ("model.likelihood=bernoulli",)),
]
LEVERS = [
    Row("mnist", WIDE),
    Row("mnist", ("model.latent=16",)),
    Row("mnist", ("model.latent=40", "model.likelihood=bernoulli")),
    Row("mnist", (*WIDE, "model.kl_weight=0.25")),
    Row("mnist", (*WIDE, "server.targets=samples")),
    Row("mnist", (*WIDE, "model.network=conv", "model.channels=[32, 64, 128]")),
    Row("variants/centralised", WIDE),
]
LARGE = ("local.batch_size=1024", "model.likelihood=bernoulli")
PRIVATE = [
    Row("table2/mnist/dp-sgd", ("local.batch_size=1024",)),
    Row("table2/mnist/dp-sgd", (*LARGE, "model.latent=16", "model.hidden=[128]", "local.learning_rate=2e-3")),
    Row("table2/mnist/dp-sgd", (*LARGE, "model.latent=8", "model.hidden=[64]", "local.learning_rate=4e-3")),
    Row("table2/mnist/dp-sgd", (*LARGE, "model.latent=16", "model.hidden=[128]", "local.epochs=30")),
    *(
        Row("table2/mnist/dp-sgd", (*LARGE, "model.latent=16", "model.hidden=[128]", "local.learning_rate=2e-3", clip))
        for clip in ("privacy.clip=0.1", "privacy.clip=10")
    ),
]
SETS = {
    "tables": TABLES,
    "fashion": FASHION,
    "variants": VARIANTS,
    "figures": FIGURES,
    "two": TWO,
    "levers": LEVERS,
    "private": PRIVATE,
}


@dataclass(frozen=True)
class Measures:
    """What is measured of a row."""

    metrics: Sequence[str]
    every: int  # rounds between two measurements of the same; 0: at the end alone
    audited: bool
    more: Sequence[str]  # changes of all rows


class Run:
    """A row with one seed, and what was found of it so far."""

    def __init__(self, row: Row, config: Config, wanted: Measures) -> None:
        self.row, self.config, self.wanted = row, config, wanted
        self.experiment = Experiment.of(config)
        self.state = initial_state(self.experiment.method, self.experiment.federation, config)
        self.losses: list[dict[str, float]] = []
        self.over_rounds: dict[int, dict[str, float]] = {}
        settings = replace(config.evaluation, metrics=tuple(wanted.metrics))
        device = device_of(config.engine)
        self._evaluator = Evaluator(self.experiment.federation, settings, self.experiment.streams, device)

    def job(self, number: int) -> Job:
        """A round to be carried out."""
        context = RoundContext(
            number, self.config.rounds, participants_of(self.config, self.experiment.federation, number)
        )
        return Job(self.state, context, lambda _: None)

    def after(self, state: FederationState, losses: Mapping[str, float]) -> None:
        """A round was carried out."""
        self.state = state
        self.losses.append({name: round(value, 4) for name, value in losses.items()})
        if self.wanted.every and len(self.losses) % self.wanted.every == 0:
            self.over_rounds[len(self.losses)] = self._scores()

    def found(self) -> dict[str, Any]:
        """All that is kept of a finished run."""
        start, first = time.perf_counter(), self.config.seed == 0
        found: dict[str, Any] = {"row": self.row.label, "seed": self.config.seed, "metrics": self._scores()}
        found["losses"] = self.losses
        if self.over_rounds:
            found["over_rounds"] = self.over_rounds
        evaluation, federation = self._evaluation(), self.experiment.federation
        if self.wanted.audited and first:
            findings = outliers(Audit(evaluation, {}, Effort()))
            found["outliers"] = findings.values
            if (shown := findings.pictures.get("silo=silo-0")) is not None:
                found["exposed"] = {name: pixels(getattr(shown, name)) for name in ("outliers", "outputs", "typical")}
        if first and evaluation.generates:
            found["samples"] = pixels(evaluation.generator.sample(GRID, group=federation.groups[0], seed=0))
            some = federation.test.take(torch.arange(min(CODES, len(federation.test))))
            places = [
                [round(value, 3) for value in code[:2]] for code in evaluation.autoencoders[0].codes(some).tolist()
            ]
            found["codes"] = [[*place, label] for place, label in zip(places, some.y.tolist(), strict=True)]
        return {**found, "seconds": {"evaluation": time.perf_counter() - start}}

    def _evaluation(self) -> Evaluation:
        method, federation = self.experiment.method, self.experiment.federation
        generator = Generator(method, self.state.server, federation.groups)
        return self._evaluator.evaluation(generator, KeptModels(self.state, federation))

    def _scores(self) -> dict[str, float]:
        return {k: v for _, values, _ in self._evaluator.measure(self._evaluation()) for k, v in values.items()}


def measured(row: Row, seeds: Sequence[int], noise: dict[str, float], wanted: Measures) -> Iterator[dict[str, Any]]:
    """Train a row with all seeds in one program, then measure each."""
    start = time.perf_counter()
    runs = [Run(row, row.config(seed, noise, wanted.more), wanted) for seed in seeds]
    first, *others = (run.experiment.trainer for run in runs)
    engine = FusedEngine(
        first, FusedOptions(device_of(first.config.engine), first.config.engine.precision), packed=others
    )
    ready = time.perf_counter() - start
    for number in range(1, runs[0].config.rounds + 1):
        outcomes = engine.rounds({index: run.job(number) for index, run in enumerate(runs)})
        for index, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                raise outcome
            state, report = outcome
            runs[index].after(state, report.terms)
    seconds = {"ready": ready, "training": time.perf_counter() - start - ready, "runs": len(runs)}
    engine.close()
    for run in runs:
        found = run.found()
        yield {**found, "engine": engine.describe(), "seconds": {**seconds, **found["seconds"]}}


def pixels(images: torch.Tensor) -> list[list[int]]:
    """Images as whole numbers from 0 to 255."""
    found: list[list[int]] = (images.clamp(0, 1) * 255).to(torch.uint8).flatten(1).tolist()
    return found


def attempt(row: Row, seeds: Sequence[int], noise: dict[str, float], wanted: Measures) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    try:
        found.extend(measured(row, seeds, noise, wanted))
    except Exception:
        found.append({"row": row.label, "seed": list(seeds), "error": traceback.format_exc(limit=-4)})
    return found


def planned() -> dict[str, float]:
    """For each private row the noise multiplier that its most demanding silo needs."""
    found = {}
    for row in {row.label: row for rows in SETS.values() for row in rows}.values():
        config = row.config(0, {})
        if config.privacy.mechanism != "none":
            plans = Experiment.of(config).trainer.privacy
            found[row.label] = max(noise for plan in plans for noise in plan.noise.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="+", choices=list(SETS), default=["tables"])
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose label contains one of these; . is its end")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after so long")
    parser.add_argument("--noise", type=Path, help="what --plan wrote")
    parser.add_argument("--known", type=Path, help="results whose rows and seeds are taken over, not run again")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--audit", action="store_true", help="the outlier-exposure audit as well, of seed 0")
    parser.add_argument("--pictures", type=Path, help="where pixels and latents go, for benchmarks/align_fl_figures.py")
    parser.add_argument("--metrics", nargs="+", default=METRICS)
    parser.add_argument("--every", type=int, default=0, help="rounds between measurements; 0: at the end alone")
    parser.add_argument("--change", nargs="*", default=[], help="key.sub=value for all rows")
    parser.add_argument("--name", default="align_fl")
    arguments = parser.parse_args()
    if arguments.plan:
        arguments.plan.write_text(json.dumps(planned(), indent=2) + "\n", encoding="utf-8")
        return
    noise = json.loads(arguments.noise.read_text(encoding="utf-8")) if arguments.noise else {}
    done = json.loads(arguments.known.read_text(encoding="utf-8"))["rows"] if arguments.known else []
    known = {(found["row"], found["seed"]) for found in done}
    every = [row for name in arguments.set for row in SETS[name]]
    rows = list(dict.fromkeys(row for part in arguments.only for row in every if part in f"{row.label}."))
    wanted = Measures(arguments.metrics, arguments.every, arguments.audit, arguments.change)
    pictures: dict[str, Any] = {}
    start = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(attempt, row, seeds, noise, wanted)
            for row in rows
            for seeds in seeds_together(row, [seed for seed in arguments.seeds if (row.label, seed) not in known])
        ]
        for job in as_completed(jobs):
            if job.cancelled():
                continue
            passed = time.perf_counter() - start
            for last in job.result():
                if shown := {key: last.pop(key) for key in PICTURES if key in last}:
                    pictures[last["row"]] = shown
                done.append(last)
                told = ("accuracy", "frechet")
                scores = {k: round(v, 4) for k, v in last.get("metrics", {}).items() if any(word in k for word in told)}
                heads = f"{passed:.0f} s", last["row"], last["seed"]
                print(*heads, last.get("seconds", last.get("error")), scores, flush=True)
            keep(arguments.name, done, wall=passed)
            if arguments.pictures:
                arguments.pictures.write_text(json.dumps(pictures), encoding="utf-8")
            if passed > arguments.seconds:
                for waiting in jobs:
                    waiting.cancel()


def seeds_together(row: Row, seeds: Sequence[int]) -> list[Sequence[int]]:
    """Private runs share no program, so each is a job of its own."""
    private = row.config(0, {}).privacy.mechanism != "none"
    return [[seed] for seed in seeds] if private else [seeds] * bool(seeds)


if __name__ == "__main__":
    main()
