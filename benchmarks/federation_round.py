"""What a round of a federation costs beyond training: every process is one of a deployment, with TLS.

    python benchmarks/federation_round.py --name federation_round-cpu
    python benchmarks/federation_round.py --sizes 7k,1.1M,26M
    python benchmarks/federation_round.py --many 10,20,50 --name federation_many-cpu

Both wires are in one table: fedloom's own, and a Flower federation in which ``flwr run`` starts fedloom's app. All are
processes of one machine; only the network between machines is missing. Seconds of processors are of all of them
together, less what the same training takes in one process. The first round is left out. Memory counts shared pages
once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import keep, show
from fedloom.config import Config, load_config
from fedloom.deployment.demo import POLICY, Neighbourhood, running, settle
from fedloom.deployment.direct.conductor import DirectConductor
from fedloom.deployment.flower.folder import write_app
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.processes import Child
from fedloom.deployment.tail import run_at
from fedloom.engines.base import site_of
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment, train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.streams import Streams
from flower_federation import standing
from places import charter_of

SIZES = {"7k": ("[4]", 2), "1.1M": ("[512, 256]", 40), "26M": ("[3072, 3072]", 256)}  # hidden layers, latent
SILOS = 3
WEIGHING = 30  # times as long as memory is counted, it is not: counting slows the silos down
TICKS = os.sysconf("SC_CLK_TCK")


def config_of(size: str, rounds: int, silos: int) -> Config:
    hidden, latent = SIZES[size]
    small = (f"data.silos={(silos + 1) // 2}", "data.records_per_silo=64", "evaluation.metrics=[]")
    model = (f"model.hidden={hidden}", f"model.latent={latent}", "participation.rate=1.0")
    engine = ("engine.name=reference", "engine.workers=1", "engine.threads=1")
    return load_config("demo", ["method.name=fedvae", f"rounds={rounds}", f"name={size}", *small, *model, *engine])


def below(roots: set[int]) -> set[int]:
    """These processes and all that they have started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    found, added = set(roots), True
    while added:
        more = {number for number, parent in parents.items() if parent in found} - found
        found, added = found | more, bool(more)
    return found


def used(processes: set[int]) -> float:
    """Seconds of processors, with those of children that have ended."""
    return sum(sum(map(int, text.rpartition(")")[2].split()[11:15])) for text in texts(processes, "stat")) / TICKS


def memory(processes: set[int]) -> float:
    """Bytes, what several share once; the system counts pages for it, which takes as long as a message."""
    return sum(1024 * float(text.partition("\nPss:")[2].split()[0]) for text in texts(processes, "smaps_rollup"))


def texts(processes: set[int], name: str) -> Iterator[str]:
    for number in processes:
        try:
            yield Path(f"/proc/{number}/{name}").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue


@dataclass(frozen=True)
class Place:
    """A federation that stands: the folders of its silos, their processes, and how an experiment is run there."""

    wire: str
    homes: list[Path]
    children: list[Child]
    folder: Callable[[Config], Path]  # of an experiment's run
    run: Callable[[Config], None]
    seconds: float  # until all were there
    walls: bool = False


def watched(place: Place, config: Config) -> dict[str, float]:
    """What everything took while a run went on: processors in all rounds but the first, memory of the silos at most."""
    own = {child.process.pid for child in place.children if child.process}
    path, seconds, highest, over = place.folder(config) / "metrics.jsonl", dict[int, float](), [0.0], threading.Event()

    def count() -> None:
        while not over.wait(0.1):
            done = len(read_lines(path))
            if done in (1, config.rounds) and done not in seconds:
                seconds[done] = used(below({os.getpid()}) - {os.getpid()})

    def weigh() -> None:
        rest = 0.5
        while not over.wait(rest):
            start = time.monotonic()
            highest.append(memory(below(own)))
            rest = max(0.5, WEIGHING * (time.monotonic() - start))

    watching = [threading.Thread(target=each) for each in (count, weigh)]
    for each in watching:
        each.start()
    try:
        place.run(config)
    finally:
        over.set()
        for each in watching:
            each.join()
    last = seconds.get(config.rounds) or used(below({os.getpid()}) - {os.getpid()})
    return {
        "cpu_seconds": (last - seconds[1]) / (config.rounds - 1),
        "megabytes_per_silo": max(highest) / 1e6 / len(place.homes),
    }


def trained_alone(config: Config, federation: Federation, folder: Path) -> float:
    """Seconds of a processor that a round of all silos takes in this process, when models are built."""
    torch.set_num_threads(1)
    taken = []
    for rounds, path in ((1, folder.with_name(f"{folder.name}-first")), (config.rounds, folder)):
        start = time.process_time()
        train(replace(config, rounds=rounds), path, federation)
        taken.append(time.process_time() - start)
    return (taken[1] - taken[0]) / (config.rounds - 1)


def measured(place: Place, federation: Federation, config: Config, reference: Path) -> dict[str, Any]:
    """Means over all rounds but the first, in which workers build their models."""
    alone = trained_alone(config, federation, reference)
    before = {home: set((home / "runs").glob("*")) for home in place.homes}
    folder, taken = place.folder(config), watched(place, config)
    rows = {row["round"]: row["seconds"] for row in read_lines(folder / "metrics.jsonl")}
    events = read_lines(folder / "silos.jsonl")
    counted = range(2, config.rounds + 1)
    training = []
    for home in place.homes:
        (own,) = set((home / "runs").glob("*")) - before[home]
        training.append({row["round"]: row["seconds"] for row in read_lines(own / "metrics.jsonl")})
    slowest = statistics.fmean(max(each[number] for each in training) for number in counted)
    seconds = statistics.fmean(rows[number] for number in counted)
    ours, theirs = load_checkpoint(folder), load_checkpoint(reference)
    parameters = Experiment.of(config, federation).method.build(site_of(federation, 0)).parameters()
    return {
        "wire": place.wire,
        "silos": len(place.homes),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "rounds": len(counted),
        "round": seconds,
        "beyond_training": seconds - slowest,
        "cpu_beyond_training": taken["cpu_seconds"] - alone,
        "megabytes_per_silo": taken["megabytes_per_silo"],
        "bytes_up_per_silo": next(row["bytes"] for row in events if row["event"] == "answered"),
        "bytes_down_per_silo": next(row["bytes"] for row in events if row["event"] == "asked"),
        "asked_twice": sum(row["event"] == "asked" for row in events) - config.rounds * len(place.homes),
        "bit_equal": all(torch.equal(ours.server[name], theirs.server[name]) for name in theirs.server),
        "walls": place.walls,
        "seconds_until_all_are_there": place.seconds,
    }


def all_there(place: Neighbourhood) -> bool:
    try:
        known = DirectConductor(place.server).silos().values()
    except FedloomError:
        return False
    return sum(silo["there"] == "online" for silo in known) == len(place.silos)


AGREEING = POLICY.format(method="fedvae", blocks='"encoder", "decoder"', payloads='"records"')


@contextmanager
def direct(folder: Path, federation: Federation, *, walls: bool) -> Iterator[Place]:
    """Hub, executor and silos on fedloom's own wire."""
    place = settle(folder, federation, AGREEING, RoundRules())
    start = time.monotonic()

    def found(config: Config) -> Path:
        return folder / f"run-{config.name}"

    def run(config: Config) -> None:
        run_at(place.server, config, found(config), print)

    with running(place, lambda said: print(said, flush=True), apart=walls) as (_, joined):
        while not all_there(place):
            time.sleep(0.5)
        children = [child for silo in joined for child in silo.household.children]
        homes = [home.path for home in place.silos]
        yield Place("direct", homes, children, found, run, time.monotonic() - start, walls)


@contextmanager
def flower(folder: Path, federation: Federation, *, walls: bool) -> Iterator[Place]:
    """A SuperLink and SuperNodes, without TLS; who is there is seen with the first run alone."""
    assert not walls, "walls are those of the wire 'direct'"
    charter = charter_of(federation, "flower")
    start = time.monotonic()

    def found(config: Config) -> Path:
        return others.folder / "runs" / config.name

    def run(config: Config) -> None:
        app = folder / f"app-{config.name}"
        write_app(HostedRun(config, charter, RoundRules(), f"runs/{config.name}"), app)
        said = others.run(app)
        if not found(config).is_dir():
            raise FedloomError(said.stdout + said.stderr)

    with standing(folder / "others", federation, AGREEING) as others:
        homes = [others.folder / silo.name for silo in federation.silos]
        yield Place("flower", homes, list(others.nodes), found, run, time.monotonic() - start)


WIRES = {"direct": direct, "flower": flower}


def federated(wire: str, silos: int, sizes: list[str], rounds: int, *, walls: bool) -> list[dict[str, Any]]:
    config = config_of(sizes[0], rounds, silos)
    whole = build_federation(config.data, Streams(config.seed))
    federation = replace(whole, silos=whole.silos[:silos])
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with WIRES[wire](folder, federation, walls=walls) as place:
            for size in sizes:
                alone = folder / f"alone-{size}"
                found.append(measured(place, federation, config_of(size, rounds, silos), alone))
                print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="7k,1.1M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--wires", default="", help="of direct, flower; both, or the first where silos are many")
    parser.add_argument("--many", default="", help="numbers of silos, with the smallest model, in place of the sizes")
    parser.add_argument("--walls", action="store_true", help="keep key and records in processes of their own")
    parser.add_argument("--name", default="federation_round-cpu")
    arguments = parser.parse_args()
    cases = [(int(silos), ["7k"]) for silos in arguments.many.split(",") if silos]
    cases = cases or [(SILOS, arguments.sizes.split(","))]
    wires = arguments.wires or ("direct" if arguments.many or arguments.walls else ",".join(WIRES))
    found = []
    for wire in wires.split(","):
        for silos, sizes in cases:
            found += federated(wire, silos, sizes, arguments.rounds, walls=arguments.walls)
    show("Rounds of a federation", found)
    keep(arguments.name, found)


if __name__ == "__main__":
    main()
