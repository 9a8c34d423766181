"""What five real silos that share noise come to, beside a curator who holds all records: at epsilon 1.

    python benchmarks/secure_federation.py [--seeds 3]

Refined moments on labelled vectors (MNIST's lowest frequencies, 6,000 records) and marginals on the rows of a census
(Adult's sample, 4,000), all embedded in the package. Every silo is processes of its own with TLS, over the direct wire;
noise comes from the operating system. The curator is the centralised layout with noise of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from common import keep, show
from fedloom.config import Config, load_config
from fedloom.deployment.demo import Neighbourhood, running, settle
from fedloom.deployment.directories import known_fingerprints
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment, Run
from fedloom.federation.building import build_federation
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams

VECTORS = (
    *("data.source=mnist-frequencies", "data.partition=iid", "data.silos=5", "participation.rate=1", "rounds=12"),
    *("method.name=refined_moments", "privacy.mechanism=dp-sgd", "privacy.epsilon=1.0"),
    *("evaluation.metrics=['utility']", "evaluation.samples=4000"),
)
ROWS = ("method.components=120", "method.steps=500", "evaluation.metrics=['marginals','table-utility']")
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {  # preset, overrides, payloads
    "refined moments": ("demo", VECTORS, ("records", "centre", "moments", "gradient")),
    "marginals": ("tables/demo", ROWS, ("records", "pairs")),
}
SHARED = ("privacy.delta=1e-5", "privacy.trust=distributed", "privacy.tolerated=1", "evaluation.trackers=[]")
CURATOR = ("privacy.delta=1e-5", "privacy.trust=local", "data.layout=centralised", "evaluation.trackers=[]")


def founded(folder: Path, config: Config, payloads: tuple[str, ...]) -> Neighbourhood:
    """Five silos whose operators have told each other the fingerprints of their keys."""
    policy = f'methods = ["{config.method.name}"]\npayloads = {list(payloads)}\nmax_epsilon = 100.0\n'
    federation = build_federation(config.data, Streams(config.seed))
    place = settle(folder, federation, policy, RoundRules(deadline=120.0), public=True)
    known = known_fingerprints(place.server.path)
    for home in place.silos:
        others = "".join(f'{silo} = "{key}"\n' for silo, key in known.items() if silo != home.name)
        (home.path / "policy.toml").write_text(f"{policy}[silos]\n{others}")
    return place


def figures(run: RunFolder) -> dict[str, float]:
    """What its generator is worth, beside all silos' records, which no server has."""
    settings = replace(run.config.data, layout="federated")
    federation = build_federation(settings, Streams(0))
    evaluator = Evaluator(federation, run.config.evaluation, Streams(run.config.seed), torch.device("cpu"))
    found = evaluator.values(evaluator.evaluation(Run(run).generator()))
    return {name: value for name, value in found.items() if "/real-" not in name}


def measured(name: str, seeds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    preset, overrides, payloads = CASES[name]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = load_config(preset, [*overrides, *SHARED])
        place = founded(folder, config, payloads)
        with running(place, say) as _:
            for seed in range(seeds):
                run_at(
                    place.server, load_config(preset, [*overrides, *SHARED, f"seed={seed}"]), folder / str(seed), say
                )
                run = RunFolder.open(folder / str(seed))
                seconds = mean(row["seconds"] for row in run.metrics())
                rows.append({"case": name, "who": "5 silos", "seed": seed, "round_s": seconds, **figures(run)})
        for seed in range(seeds):
            own = load_config(preset, [*overrides, *CURATOR, f"seed={seed}"])
            central = Experiment.of(own).run(folder / f"central-{seed}").folder
            seconds = mean(row["seconds"] for row in central.metrics())
            rows.append({"case": name, "who": "curator", "seed": seed, "round_s": seconds, **figures(central)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, metric by metric."""
    found = []
    for case, metric in dict.fromkeys((row["case"], name) for row in rows for name in row if "/" in name):
        line: dict[str, Any] = {"case": case, "metric": metric}
        for who in ("5 silos", "curator"):
            values = [row[metric] for row in rows if (row["case"], row["who"]) == (case, who) and metric in row]
            if values:
                line[who] = f"{mean(values):.4g} +- {stdev(values) if len(values) > 1 else 0:.2g}"
        found.append(line)
    return [line for line in found if {"5 silos", "curator"} <= line.keys()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    rows = [row for name in asked.cases for row in measured(name, asked.seeds, lambda text: print(text, flush=True))]
    keep("secure_federation-cpu", rows)
    show("five real silos beside a curator, epsilon 1", summary(rows))


if __name__ == "__main__":
    main()
