"""FedAvg of the MLP VAE in fedloom and in Flower's own simulation, side by side on the CPU.

20 silos of 300 images, one local epoch of batches of 32, 10 rounds: wall time from process start to its end, and peak
memory of all processes together (each page counted once). Flower's clients train as people write it (torch's default
Adam), and with the fused Adam that fedloom uses; Ray gives each of them one thread. Contenders take turns, and each
counts with its best run: whatever else the machine does can only slow a run down.

    python benchmarks/versus_flower.py --flower-python PATH [--repeats 3]

PATH is the Python of an environment with torch and flwr[simulation]==1.41.0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from common import keep, show, untouched_environment

SILOS, RECORDS = 20, 300
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def memory_of(mark: str) -> float:
    """Megabytes of all processes that have the mark in their environment; shared pages are divided among them."""
    total = 0.0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3
        except OSError:  # it has just ended
            continue
    return total


def measured(name: str, command: list[str], folder: Path) -> dict[str, Any]:
    """Run a contender and watch it."""
    mark = uuid.uuid4().hex
    environment = untouched_environment() | QUIET | {"BENCHMARK_MARK": mark, "FLWR_HOME": str(folder / "flower")}
    start, peak = time.perf_counter(), 0.0
    with (folder / f"{mark}.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, memory_of(mark))
            time.sleep(0.5)
        seconds = time.perf_counter() - start
        log.seek(0)
        text = log.read()
    if process.returncode:
        sys.exit(f"{name} failed:\n{text[-3000:]}")
    said = [line for line in text.splitlines() if line.startswith("loss")]
    print(f"{name}: {seconds:.1f} s, {peak:.0f} MB, {said[-1] if said else ''}", flush=True)
    return {"seconds": seconds, "peak_MB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flower-python", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    here = Path(__file__).parent
    found: dict[str, list[dict[str, Any]]] = {"flower": [], "flower, fused Adam": [], "fedloom": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = np.random.default_rng(0).integers(0, 256, (SILOS, RECORDS, 28, 28), dtype=np.uint8)
        np.save(folder / "images.npy", images)
        given = [str(folder / "images.npy"), str(arguments.rounds)]
        for number in range(arguments.repeats):
            commands = {
                "flower": [arguments.flower_python, str(here / "flower_vae.py"), *given, "default"],
                "flower, fused Adam": [arguments.flower_python, str(here / "flower_vae.py"), *given, "fused"],
                "fedloom": [sys.executable, str(here / "fedloom_vae.py"), *given, str(folder / f"run-{number}")],
            }
            for contender, command in commands.items():
                found[contender].append(measured(contender, command, folder))
    best = {contender: {key: min(run[key] for run in runs) for key in runs[0]} for contender, runs in found.items()}
    rows = [
        {
            "contender": contender,
            "time_over_fedloom": values["seconds"] / best["fedloom"]["seconds"],
            "memory_over_fedloom": values["peak_MB"] / best["fedloom"]["peak_MB"],
            "peak_MB": values["peak_MB"],
        }
        for contender, values in best.items()
    ]
    show("10 rounds of 20 silos, from process start to end", rows)
    keep("versus_flower-cpu", rows, flwr="1.41.0", repeats=arguments.repeats)


if __name__ == "__main__":
    main()
