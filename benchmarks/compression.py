"""What compression of updates saves and costs: the demonstration's FissionVAE with 320 records a silo, over seeds.

    python benchmarks/compression.py

A run's loss is the mean of its silos' over its last five rounds, and the held-out one the negative ELBO at its end, in
nats a record. Bytes are those that left a silo in a round, as the egress log has them.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import keep, show
from fedloom.config import load_config
from fedloom.experiment import train

KINDS = ("none", "bfloat16", "int8")
LAST = 5  # rounds


def measured(kind: str, seed: int, rounds: int, folder: Path) -> dict[str, Any]:
    asked = (f"seed={seed}", f"rounds={rounds}", f"sharing.compression={kind}", "data.records_per_silo=320")
    measuring = ("evaluation.every=0", "evaluation.metrics=['likelihood']", "evaluation.importance_samples=1")
    run = train(load_config("demo", [*asked, *measuring, "engine.name=fused"]), folder)
    rows = run.folder.metrics()
    sent = [row["bytes"] for row in run.folder.egress()]
    (held_out,) = (value for name, value in rows[-1].items() if re.fullmatch(r"elbo/nats/n\d+", name))
    return {
        "compression": kind,
        "seed": seed,
        "bytes": statistics.fmean(sent),
        "loss": statistics.fmean(row["train/vae/loss"] for row in rows[-LAST:]),
        "held_out": -held_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--name", default="compression-cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1, arguments.seeds + 1):
            for kind in KINDS:
                found.append(measured(kind, seed, arguments.rounds, Path(temporary) / f"{kind}-{seed}"))
                print(found[-1], flush=True)
    show("by run", found)
    keep(arguments.name, found, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
