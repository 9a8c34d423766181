"""Many silos: time per silo-step and peak memory of one round of 10 to 10,000 silos.

    python benchmarks/scaling.py [--silos 10 100 1000 10000] [--device cuda] [--unequal]
    python benchmarks/scaling.py --drawn 100 --silos 1000 100000 1000000 --hidden "[64]" --device cpu

With --drawn so many silos take part in a round, and nobody else is in memory: whole runs of four rounds, each in a
process of its own, with a run folder, an encoder of its own at each silo, and 32 MB of those in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from common import keep, prepared, seconds_of, show
from fedloom.config import load_config
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.on_demand import FederationOnDemand, SilosOnDemand
from fedloom.federation.records import Records, Silo
from fedloom.federation.rounds import RoundContext

RECORDS = 96
SIZES = (32, 64, 96, 128, 160)  # of unequal silos, in turn: on average as large as equal ones


def unequal(trainer: Trainer) -> Trainer:
    """The same silos with less of their records."""
    silos = trainer.federation.silos
    cut = (Silo(s.name, s.train.take(torch.arange(SIZES[i % len(SIZES)]))) for i, s in enumerate(silos))
    return replace(trainer, federation=replace(trainer.federation, silos=tuple(cut)))


def random_records(silo: int) -> Records:
    """Random images, a function of the silo's number alone."""
    x = torch.randint(0, 256, (RECORDS, 1, 28, 28), generator=torch.Generator().manual_seed(silo), dtype=torch.uint8)
    return Records(x, torch.zeros(RECORDS, dtype=torch.int64), torch.zeros(RECORDS, dtype=torch.int64))


def live(silos: int, drawn: int, hidden: str, device: str) -> None:
    """One such run, in this process; prints what it took."""
    begun = time.perf_counter()
    chosen = (f"participation.rate={drawn / silos}", "participation.mode=fixed", "rounds=4")
    settings = ("method.name=fedvae", "sharing.scopes.encoder=silo", *chosen)
    sizes = (f"model.hidden={hidden}", "model.latent=8", "local.batch_size=32", "local.epochs=1")
    engine = ("engine.name=fused", f"engine.device={device}", "engine.state_memory=32", "engine.keep_checkpoints=1")
    config = load_config("demo", [*settings, *sizes, *engine, "evaluation.metrics=[]"])
    members = SilosOnDemand(random_records, [RECORDS] * silos, {(0,): range(silos)}, "random")
    federation = FederationOnDemand("random", members, random_records(0), ("a",))
    experiment = Experiment.of(config, federation)
    draw = seconds_of(lambda: experiment.context(1))
    with tempfile.TemporaryDirectory() as folder:
        rows = experiment.run(Path(folder) / "run").metrics()
    whole, rounds = time.perf_counter() - begun, [row["seconds"] for row in rows]
    found = {
        "silos": silos,
        "drawn": len(rows[-1]["participants"]),
        "seconds_a_round": median(rounds[1:]),
        "of_that_the_draw": draw,
        "seconds_beside_rounds": whole - sum(rounds),
        "host_peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    print(json.dumps(found))


def of_drawn(arguments: argparse.Namespace) -> None:
    """One run after the other."""
    rows = []
    for silos in arguments.silos:
        given = ["--silos", str(silos), "--drawn", str(arguments.drawn), "--hidden", arguments.hidden]
        command = [sys.executable, __file__, *given, "--device", arguments.device, "--live"]
        done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
    show(f"runs of {arguments.drawn} silos a round on {arguments.device}", rows)
    keep(f"scaling_drawn-{arguments.device}", rows, records_per_silo=RECORDS, hidden=arguments.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hidden", default="[512, 256]")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--unequal", action="store_true", help="silos of 32 to 160 records instead of 96")
    parser.add_argument("--drawn", type=int, default=0, help="silos of a round; the others are never made")
    parser.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.live:
        live(arguments.silos[0], arguments.drawn, arguments.hidden, arguments.device)
        return
    if arguments.drawn:
        of_drawn(arguments)
        return
    device = torch.device(arguments.device)
    rows = []
    for silos in arguments.silos:
        sizes = (f"local.epochs={arguments.epochs}", f"model.hidden={arguments.hidden}")
        _, trainer, state = prepared("mlp", silos, max(SIZES) if arguments.unequal else RECORDS, *sizes)
        trainer = unequal(trainer) if arguments.unequal else trainer
        engine = FusedEngine(trainer, FusedOptions(device, chunk=arguments.chunk))
        few = silos if arguments.unequal else min(silos, 2 * arguments.chunk + silos % arguments.chunk)
        engine.round(Job(state, RoundContext(1, 2, tuple(range(few))), lambda _: None))  # records the programs
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        reports = []
        context = RoundContext(2, 2, tuple(range(silos)))
        seconds = seconds_of(lambda: reports.append(engine.round(Job(state, context, lambda _: None))[1]))  # noqa: B023
        engine.close()
        data = sum(silo.train.x.numel() for silo in trainer.federation.silos)
        device_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        rows.append(
            {
                "silos": silos,
                "us_per_silo_step": seconds / reports[0].steps * 1e6,
                "seconds": seconds,
                "device_MB_beside_data": (device_bytes - data) / 1e6 if device_bytes else 0.0,
                "data_MB": data / 1e6,
                "host_peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            }
        )
        print(rows[-1], flush=True)
    best = min(row["us_per_silo_step"] for row in rows)
    for row in rows:
        row["over_best"] = row["us_per_silo_step"] / best
    show(f"one round on {device.type}", rows)
    name = "scaling_unequal" if arguments.unequal else "scaling"
    keep(f"{name}-{device.type}", rows, epochs=arguments.epochs, records_per_silo=RECORDS)


if __name__ == "__main__":
    main()
