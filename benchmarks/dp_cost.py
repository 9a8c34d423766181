"""What a change of DP-SGD costs: a private step over a plain one, in this tree and in an older one, side by side.

    git worktree add ../before COMMIT
    python benchmarks/dp_cost.py --before ../before [--device cuda] [--repeats 5]

Every figure comes from a process of its own, in turns; what is kept is the median of each. On a CPU processor time
counts, on one thread. ``mlp`` and ``conv`` have gradients as factors, ``written out`` is FedProx, whose have to be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from common import keep, prepared, show
from dp import PRIVATE, round_microseconds
from fedloom.config import PrivacyConfig
from fedloom.engines.base import Engine
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine

BAR = 1.05
MODELS = {"mlp": ("mlp", ()), "conv": ("conv", ()), "written out": ("mlp", ("method.name=fedprox",))}
# Engine, model, silos, batch, steps of a silo in a round.
CASES = {
    "cuda": (
        ("fused", "mlp", 10, 32, 94),
        ("fused", "mlp", 10, 256, 47),
        ("fused", "mlp", 20, 32, 94),
        ("fused", "conv", 10, 32, 47),
        ("fused", "written out", 10, 32, 47),
    ),
    "cpu": (
        ("reference", "mlp", 1, 32, 30),
        ("reference", "mlp", 1, 256, 10),
        ("fused", "mlp", 1, 32, 30),
        ("reference", "conv", 1, 32, 4),
        ("reference", "written out", 1, 32, 4),
    ),
}


def microseconds(case: int, private: bool, device: str) -> float:
    """Per silo-step of whole rounds."""
    engine, model, silos, batch, steps = CASES[device][case]
    name, own = MODELS[model]
    known = {field.name for field in fields(PrivacyConfig)}
    privacy = [setting for setting in PRIVATE if setting.partition("=")[0].removeprefix("privacy.") in known]
    settings = (f"local.batch_size={batch}", "rounds=3", *own, *(privacy if private else ()))
    _, trainer, state = prepared(name, silos, batch * steps, *settings)
    made: Engine = ReferenceEngine(trainer)
    if engine == "fused":
        made = FusedEngine(trainer, FusedOptions(torch.device(device), chunk=silos))
    return round_microseconds(made, state, silos, steps, torch.device(device))


def measured(tree: Path, case: int, private: bool, device: str) -> float:
    """The same of a tree's own code, in a process."""
    command = [sys.executable, __file__, "--device", device, "--one", str(case), "yes" if private else "no"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def row_of(case: int, found: dict[tuple[str, bool], list[float]], device: str) -> dict[str, Any]:
    engine, model, silos, batch, _ = CASES[device][case]
    middle = {key: statistics.median(times) for key, times in found.items()}
    ratios = {tree: middle[tree, True] / middle[tree, False] for tree in ("before", "now")}
    return {
        "engine": engine,
        "model": model,
        "silos": silos,
        "batch": batch,
        "plain_before_us": middle["before", False],
        "private_before_us": middle["before", True],
        "plain_now_us": middle["now", False],
        "private_now_us": middle["now", True],
        "over_plain_before": ratios["before"],
        "over_plain_now": ratios["now"],
        "now_over_before": middle["now", True] / middle["before", True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="the root of the older tree")
    parser.add_argument("--device", default="cpu", choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PRIVATE"))
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(microseconds(int(arguments.one[0]), arguments.one[1] == "yes", arguments.device)))
        return
    trees = {"before": arguments.before.resolve(), "now": Path(__file__).resolve().parents[1]}
    rows = []
    for case in range(len(CASES[arguments.device])):
        found: dict[tuple[str, bool], list[float]] = {}
        for _ in range(arguments.repeats):
            for private in (False, True):
                for name, tree in trees.items():
                    found.setdefault((name, private), []).append(measured(tree, case, private, arguments.device))
        rows.append(row_of(case, found, arguments.device))
        print(rows[-1], flush=True)
        keep(f"dp_cost-{arguments.device}", rows, bar=BAR, repeats=arguments.repeats)
    show(f"a private step on {arguments.device}, before and now", rows)
    missed = [row for row in rows if row["now_over_before"] > BAR]
    print(f"\nbar: at most {BAR} of the time before; missed by {len(missed)} of {len(rows)} rows")


if __name__ == "__main__":
    main()
