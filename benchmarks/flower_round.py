"""What a round of a real federation costs beyond training: three silos, a server, the proxy and TLS on one machine.

    python benchmarks/flower_round.py --name flower_round-cpu

Every process is one of the deployment; only the network between machines is missing. A model of a few thousand
parameters shows what Flower takes for nothing: it looks for messages every so often, and starts a process for each.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import keep
from fedloom.config import Config, load_config
from fedloom.deployment.demo import POLICY, Neighbourhood, running, settle
from fedloom.deployment.tail import run_at
from fedloom.engines.base import site_of
from fedloom.engines.flower.rules import RoundRules
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.runs.files import read_lines
from fedloom.streams import Streams

SIZES = {"few": ("[4]", 2), "1M": ("[512, 256]", 40), "25M": ("[3072, 3072]", 256)}  # hidden layers, latent
SILOS = 3


def config_of(size: str, rounds: int) -> Config:
    hidden, latent = SIZES[size]
    small = ("data.silos=2", "data.records_per_silo=64", "evaluation.metrics=[]", "participation.rate=1.0")
    model = (f"model.hidden={hidden}", f"model.latent={latent}")
    return load_config("demo", ["method.name=fedvae", f"rounds={rounds}", f"name={size}", *small, *model])


def measured(place: Neighbourhood, federation: Federation, size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Means over all rounds but the first, in which workers build their models; seconds."""
    config = config_of(size, rounds)
    before = [len(_answers(home.logs / "worker.log")) for home in place.silos]
    run_at(place.server, config, folder, print)
    rows = {row["round"]: row for row in read_lines(folder / "metrics.jsonl")}
    answered = [row for row in read_lines(folder / "silos.jsonl") if row["event"] == "answered"]
    (trained,) = {path.name for path in (place.silos[0].path / "runs").iterdir() if _named(path, size)}
    counted = range(2, rounds + 1)
    training, working = [], []
    for home, known in zip(place.silos, before, strict=True):
        own = read_lines(home.path / "runs" / trained / "metrics.jsonl")
        training += [row["seconds"] for row in own if row["round"] in counted]
        working += _answers(home.logs / "worker.log")[known + 1 :]
    waiting = [row["seconds"] for row in answered if row["round"] in counted]
    model = Experiment.of(config, federation).method.build(site_of(federation, 0))
    round_mean = statistics.fmean(rows[number]["seconds"] for number in counted)
    slowest = statistics.fmean(max(r["seconds"] for r in answered if r["round"] == number) for number in counted)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": len(counted),
        "bytes_up_per_silo": answered[0]["bytes"],
        "round": round_mean,
        "beyond_training": round_mean - statistics.fmean(training),
        "training": statistics.fmean(training),
        "silo_beyond_training": statistics.fmean(working) - statistics.fmean(training),
        "flower": statistics.fmean(waiting) - statistics.fmean(working),
        "server": round_mean - slowest,
    }


def _named(path: Path, size: str) -> bool:
    return f'name = "{size}"' in (path / "run.toml").read_text(encoding="utf-8")


def _answers(log: Path) -> list[float]:
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    return [float(seconds) for seconds in re.findall(r"update after ([\d.]+) seconds", text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--name", default="flower_round-cpu")
    arguments = parser.parse_args()
    config = config_of("few", arguments.rounds)
    whole = build_federation(config.data, Streams(config.seed))
    federation = replace(whole, silos=whole.silos[:SILOS])
    policy = POLICY.format(method="fedvae", blocks='"encoder", "decoder"', payloads='"records"')
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        place = settle(folder, federation, policy, RoundRules(), proxy=True)
        found = []
        with running(place, print, proxy=True):
            for size in arguments.sizes.split(","):
                found.append(measured(place, federation, size, arguments.rounds, folder / f"run-{size}"))
                print(found[-1], flush=True)
    keep(arguments.name, found, silos=SILOS)


if __name__ == "__main__":
    main()
