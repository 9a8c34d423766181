"""Many silos: time per silo-step and peak memory of one round of 10 to 10,000 silos.

python benchmarks/scaling.py [--silos 10 100 1000 10000] [--device cuda] [--unequal]
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import replace

import torch

from common import keep, prepared, seconds_of, show
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.training import Trainer
from fedloom.federation.records import Silo
from fedloom.federation.rounds import RoundContext

RECORDS = 96
SIZES = (32, 64, 96, 128, 160)  # of unequal silos, in turn: on average as large as equal ones


def unequal(trainer: Trainer) -> Trainer:
    """The same silos with less of their records."""
    silos = trainer.federation.silos
    cut = (Silo(s.name, s.train.take(torch.arange(SIZES[i % len(SIZES)]))) for i, s in enumerate(silos))
    return replace(trainer, federation=replace(trainer.federation, silos=tuple(cut)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hidden", default="[512, 256]")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--unequal", action="store_true", help="silos of 32 to 160 records instead of 96")
    arguments = parser.parse_args()
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
