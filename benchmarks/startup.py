"""How long a person waits before anything happens: the command's help, and the package's import.

    python benchmarks/startup.py [--repeats 10]

A bar is met by the clock, which is what a person waits: 0.5 s for ``fedloom --help`` and 0.3 s for ``import fedloom``,
in the best of all repeats, because what else the machine does can only add to it. Processor time stands beside it, and
so does Python alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from common import keep, show

STARTS = {
    "python -c pass": (["-c", "pass"], None),
    "import fedloom": (["-c", "import fedloom"], 0.3),
    "fedloom --version": (["-m", "fedloom", "--version"], 0.5),
    "fedloom --help": (["-m", "fedloom", "--help"], 0.5),
    "fedloom run --help": (["-m", "fedloom", "run", "--help"], 0.5),
    "fedloom list presets": (["-m", "fedloom", "list", "presets"], None),
}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, processor


def row(name: str, clock: Sequence[float], processor: Sequence[float], bar: float | None) -> dict[str, Any]:
    """What is kept of a start's repeats."""
    return {
        "start": name,
        "best_clock_s": round(min(clock), 3),
        "median_clock_s": round(median(clock), 3),
        "median_processor_s": round(median(processor), 3),
        "bar_s": bar,
        "met": None if bar is None else min(clock) <= bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    rows = []
    for name, (arguments, bar) in STARTS.items():
        seconds(arguments)  # compiles what was not, and fills the disk's cache
        clock, processor = zip(*(seconds(arguments) for _ in range(repeats)), strict=True)
        rows.append(row(name, clock, processor, bar))
    show("startup", rows)
    keep("startup-cpu", rows)


if __name__ == "__main__":
    main()
