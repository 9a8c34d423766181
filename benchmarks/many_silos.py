"""Whether a federation of many silos finishes its rounds on one machine, and what a round costs.

    python benchmarks/many_silos.py --silos 20 --rounds 3 --name many_silos-cpu

Every silo is what it is in a deployment, two processes with a key of their own; server, proxy and TLS are there, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import keep
from fedloom.config import load_config
from fedloom.deployment.control import Control
from fedloom.deployment.demo import POLICY, running, settle
from fedloom.deployment.tail import run_at
from fedloom.engines.base import site_of
from fedloom.engines.flower.rules import RoundRules
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.runs.files import read_lines
from fedloom.streams import Streams

TICKS = os.sysconf("SC_CLK_TCK")


def processes() -> list[Path]:
    """All that this one has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    found, added = {os.getpid()}, True
    while added:
        below = {number for number, parent in parents.items() if parent in found} - found
        found, added = found | below, bool(below)
    return [Path(f"/proc/{number}") for number in found - {os.getpid()}]


def spent() -> dict[str, float]:
    """Seconds of processors and bytes of memory that they have taken; pages that are shared count once."""
    seconds = size = 0.0
    for path in processes():
        try:
            seconds += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15])) / TICKS
            (line,) = [row for row in (path / "smaps_rollup").read_text().splitlines() if row.startswith("Pss:")]
            size += 1024 * int(line.split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {"cpu_seconds": seconds, "bytes": size}


def measured(silos: int, rounds: int, folder: Path) -> dict[str, Any]:
    small = (f"data.silos={silos // 2}", "data.records_per_silo=64", "evaluation.metrics=[]", "participation.rate=1.0")
    model = ("model.hidden=[4]", "model.latent=2", f"rounds={rounds}")
    config = load_config("demo", ["method.name=fedvae", *small, *model])
    federation = build_federation(config.data, Streams(config.seed))
    policy = POLICY.format(method="fedvae", blocks='"encoder", "decoder"', payloads='"records"')
    place, start = settle(folder, federation, policy, RoundRules(), proxy=True), time.monotonic()
    with running(place, print, proxy=True):
        control = Control(place.server)
        while sum(node.status == "online" for node in control.nodes()) < silos:
            time.sleep(0.5)
        online, before = time.monotonic() - start, spent()
        highest, over = [before["bytes"]], threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                highest.append(spent()["bytes"])

        watching = threading.Thread(target=watch)
        watching.start()
        run_at(place.server, config, folder / "run", print)
        after = spent()
        over.set()
        watching.join()
    rows = read_lines(folder / "run" / "metrics.jsonl")
    parameters = Experiment.of(config, federation).method.build(site_of(federation, 0)).parameters()
    return {
        "silos": silos,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "seconds_until_all_are_there": online,
        "seconds_of_rounds": [row["seconds"] for row in rows],
        "silos_of_rounds": [len(row["participants"]) for row in rows],
        "cpu_seconds_per_round": (after["cpu_seconds"] - before["cpu_seconds"]) / rounds,
        "megabytes": max(highest) / 1e6,
        "megabytes_per_silo": max(highest) / 1e6 / silos,
        "events": dict(Counter(row["event"] for row in read_lines(folder / "run" / "silos.jsonl"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="many_silos-cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(arguments.silos, arguments.rounds, Path(temporary))
    print(found)
    keep(arguments.name, [found])


if __name__ == "__main__":
    main()
