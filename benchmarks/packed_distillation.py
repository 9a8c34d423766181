"""ALIGN-FL packed: seconds of a round of several seeds, distillations in one stack or one by one, or alone.

    python benchmarks/packed_distillation.py [--device cuda] [--share 0.02] [--runs 3] [--private]

Five silos and a server as on MNIST, of random images; with ``--share 1`` a silo takes 940 steps a round and the server
1,960. All ways are timed in turn, and the fastest round of each counts: on a CPU in seconds of the processor, because
others may be at work there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from common import keep, random_federation, seconds_of, show
from fedloom.config import Config, load_config
from fedloom.engines.base import Distilled, Job, initial_state
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_distillation import DistillationPool
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.rounds import RoundContext
from fedloom.methods.distil import DistillationJob

SILOS, RECORDS, SAMPLES = 5, 12000, 5000  # of a silo, and of its decoder
PRIVATE = (
    "privacy.mechanism=dp-sgd",
    "privacy.noise_multiplier=1",
    "privacy.accountant=rdp",
    "privacy.noise=test",  # engines are driven without a ledger, which would give each round its secret
)
NETWORKS = {"mlp of the paper": "[512, 256, 128]", "tiny mlp": "[16]"}  # in tiny ones what a step costs anyway is most


class OneByOne(DistillationPool):
    """A classroom for each run."""

    def __init__(self, configs: Sequence[Config], make: Callable[[Sequence[Trainer]], FusedEngine]) -> None:
        super().__init__(configs, make)
        self._rooms = [DistillationPool(configs, make) for _ in configs]

    def distil(self, distillations: Mapping[int, DistillationJob]) -> dict[int, Distilled | Exception]:
        """One after another."""
        return {run: self._rooms[run].distil({run: distillation})[run] for run, distillation in distillations.items()}


def rounds_of_pack(
    network: str, share: float, runs: int, device: torch.device, privacy: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """A round of all runs in one program, with distillations one by one, and of each run in a program of its own."""
    federation = random_federation(SILOS, round(RECORDS * share), (1, 28, 28))
    experiments = [
        Experiment.of(
            load_config(
                "align-fl/mnist",
                [
                    f"model.hidden={NETWORKS[network]}",
                    f"server.samples={round(SAMPLES * share)}",
                    f"seed={seed}",
                    *privacy,
                ],
            ),
            federation,
        )
        for seed in range(runs)
    ]
    options = FusedOptions(device, chunk=SILOS * runs)
    trainers = [experiment.trainer for experiment in experiments]
    starts = [initial_state(e.method, federation, e.config) for e in experiments]
    context = RoundContext(1, 2, tuple(range(SILOS)))
    jobs = {run: Job(start, context, lambda _: None) for run, start in enumerate(starts)}
    pack, half_packed = (FusedEngine(trainers[0], options, packed=trainers[1:]) for _ in range(2))
    half_packed._distillation_pool = OneByOne([trainer.config for trainer in trainers], half_packed.learning)
    alone = [FusedEngine(trainer, options) for trainer in trainers]
    return {
        "packed": lambda: pack.rounds(jobs),
        "distillations one by one": lambda: half_packed.rounds(jobs),
        "alone": lambda: [engine.rounds({0: jobs[run]}) for run, engine in enumerate(alone)],
    }


def processor_seconds_of(work: Callable[[], object]) -> float:
    """What this process took for a piece of work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", type=float, default=0.02, help="of the records and samples")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--private", action="store_true", help="silos under DP-SGD")
    parser.add_argument("--name", default="packed_distillation", help="of the file with the results")
    arguments = parser.parse_args()
    timed = processor_seconds_of if arguments.device == "cpu" else seconds_of
    rows = []
    for network in NETWORKS:
        privacy = PRIVATE if arguments.private else ()
        ways = rounds_of_pack(network, arguments.share, arguments.runs, torch.device(arguments.device), privacy)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + arguments.rounds):
            for name, work in ways.items():
                found[name].append(timed(work))
        best = {name: min(seconds[1:]) for name, seconds in found.items()}  # the first records its steps
        sizes = {"network": network, "share": arguments.share, "runs": arguments.runs}
        rows.append({**sizes, **best, "gain": best["distillations one by one"] / best["packed"]})
    keep(f"{arguments.name}-{'private-' if arguments.private else ''}{arguments.device}", rows)
    show("seconds of a round of all runs", rows)


if __name__ == "__main__":
    main()
