"""One run on one rank, and on several of this machine: seconds of its rounds, and processor time of the whole command.

python benchmarks/ranks.py [--ranks 2] [--rounds 6] [--repeats 3]

Where other work keeps the machine busy, seconds say little: more processes get more of it. Processor time does not.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import keep, show
from fedloom.experiment import load

WORK = ("local.epochs=4", "participation.rate=1", "evaluation.every=0", "evaluation.metrics=[]")
ENGINES = {
    "reference": ("engine.name=reference", "engine.workers=1", "engine.threads=1"),
    "fused": ("engine.name=fused", "data.silos=20"),  # 40 silos, so that there are four stacks
}


def lived(folder: Path, rounds: int, *words: str) -> tuple[float, float]:
    """Seconds of a round, after the first, and processor seconds of all processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "fedloom", "run", "demo", f"rounds={rounds}", *WORK, *words, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return median(row["seconds"] for row in load(folder).metrics()[1:]), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for engine, settings in ENGINES.items():
        found: dict[int, list[tuple[float, float]]] = {1: [], arguments.ranks: []}
        for repeat in range(arguments.repeats):
            for ranks, times in found.items():  # in turns, so that both meet the same neighbours
                with tempfile.TemporaryDirectory() as scratch:
                    several = [f"--ranks={ranks}"] * (ranks > 1)
                    times.append(lived(Path(scratch) / f"run-{repeat}", arguments.rounds, *settings, *several))
        one, more = ([median(each) for each in zip(*times, strict=True)] for times in found.values())
        row = {"engine": engine, "ranks": arguments.ranks, "seconds_of_a_round": one[0], "on_ranks": more[0]}
        rows.append(row | {"times_as_fast": one[0] / more[0], "times_the_processor": more[1] / one[1]})
        print(rows[-1], f"load {os.getloadavg()[0]:.0f}", flush=True)
    show(f"{arguments.ranks} ranks against one", rows)
    keep("ranks", rows, rounds=arguments.rounds, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
