"""What the server of ALIGN-FL can do with the same decoders: silos train once, then servers learn in several ways.

Nothing comes down to the silos, so what they send does not depend on what the server does with it. All servers have two
latents and take as many steps as the centralised VAE beside them. The data must be in FEDLOOM_DATA.

    python benchmarks/align_fl_server.py --records 600 --seeds 0 1 2    # a tenth of the records
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import torch

from common import keep, show
from fedloom.config import Config, load_config
from fedloom.engines.base import FederationState, Result, School, Taught, conclude, initial_state, participants_of
from fedloom.engines.choice import device_of
from fedloom.engines.fused import Classroom, FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment, KeptModels
from fedloom.federation.rounds import RoundContext
from fedloom.methods.distil import Lesson
from fedloom.methods.generator import Generator

ALL_RECORDS = 6000  # of a class
SAMPLES, STEPS = 5000, 1960  # of a decoder, and of the server, in a round with all records
ACCURACY = "probe/accuracy/n10000"

Silos = Callable[[FederationState, RoundContext], list[Result]]


def ways(samples: int) -> dict[str, tuple[str, ...]]:
    """How a server may learn, beside the paper's way; the number of steps is the same in all of them."""
    fresh = (f"server.samples={10 * samples}", "server.epochs=1")
    return {
        "as published": (f"server.samples={samples}",),
        "no sample twice": fresh,
        "moments kept": (f"server.samples={samples}", "server.keep_optimizer=true"),
        "no sample twice, moments kept": (*fresh, "server.keep_optimizer=true"),
        "no sample twice, latents in a ball of 2": (*fresh, "server.latents=ball", "server.radius=2"),
    }


class OneServersSchool:
    """A school on the GPU for a single server."""

    def __init__(self, trainer: Trainer) -> None:
        self.device = device_of(trainer.config.engine)
        self._classroom = Classroom([trainer.config], FusedOptions(self.device))

    def teach(self, lesson: Lesson) -> Taught:
        """Local training of one more site."""
        outcome = self._classroom.teach({0: lesson})[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def silos_and_school(trainer: Trainer) -> tuple[Silos, School]:
    """What trains the silos, and where the server learns."""
    device = device_of(trainer.config.engine)
    if device.type == "cpu":
        engine = ReferenceEngine(trainer, workers=1, threads=1)
        return lambda state, context: list(engine.train(engine.tasks(state, context))), engine
    return FusedEngine(trainer, FusedOptions(device)).train, OneServersSchool(trainer)


def probed(experiment: Experiment, config: Config, state: FederationState) -> dict[str, float]:
    """The probe's scores."""
    settings = replace(config.evaluation, metrics=("probe",))
    evaluator = Evaluator(experiment.federation, settings, experiment.streams, device_of(config.engine))
    generator = Generator(experiment.method, state.server, experiment.federation.groups)
    return evaluator.evaluate(generator, KeptModels(state, experiment.federation))


def one_seed(records: int, seed: int) -> list[dict[str, Any]]:
    """All ways on the decoders of one seed, and a centralised VAE that does or does not keep its moments."""
    base = (f"data.records_per_class={records}", f"seed={seed}")
    share = records / ALL_RECORDS
    found: list[dict[str, Any]] = []
    sent: list[list[Result]] = []
    federation = None
    for name, changes in ways(round(SAMPLES * share)).items():
        start = time.perf_counter()
        config = load_config("align-fl/mnist", [*base, *changes])
        experiment = Experiment.of(config, federation)
        federation = experiment.federation
        silos, school = silos_and_school(experiment.trainer)
        state = initial_state(experiment.method, federation, config)
        for number in range(1, config.rounds + 1):
            context = RoundContext(number, config.rounds, participants_of(config, federation, number))
            if len(sent) < number:
                sent.append(silos(state, context))
            state, _ = conclude(experiment.method, state, context, sent[number - 1], experiment.streams, school)
        found.append(row(name, seed, probed(experiment, config, state), start))
    for name, kept in {"centralised": "false", "centralised, moments kept": "true"}.items():
        start = time.perf_counter()
        settings = (f"local.steps={round(STEPS * share)}", f"local.keep_optimizer={kept}")
        config = load_config("align-fl/variants/centralised", [*base, *settings])
        experiment = Experiment.of(config)
        silos, school = silos_and_school(experiment.trainer)
        state = initial_state(experiment.method, experiment.federation, config)
        for number in range(1, config.rounds + 1):
            context = RoundContext(number, config.rounds, (0,))
            state, _ = conclude(experiment.method, state, context, silos(state, context), experiment.streams, school)
        found.append(row(name, seed, probed(experiment, config, state), start))
    return found


def row(way: str, seed: int, metrics: dict[str, float], start: float) -> dict[str, Any]:
    """What is kept of a server."""
    print(way, seed, round(100 * metrics[ACCURACY], 2), flush=True)
    return {"way": way, "seed": seed, "seconds": time.perf_counter() - start, "metrics": metrics}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation of each way over its seeds, and how far it is from the published way with the same seed."""
    scores: dict[str, dict[int, float]] = {}
    for found in rows:
        scores.setdefault(found["way"], {})[found["seed"]] = 100 * found["metrics"][ACCURACY]
    first = next(iter(scores.values()))
    return [
        {
            "server": way,
            "accuracy, %": mean(by_seed.values()),
            "deviation": stdev(by_seed.values()) if len(by_seed) > 1 else 0.0,
            "over as published": mean(value - first[seed] for seed, value in by_seed.items()),
            "seeds": len(by_seed),
        }
        for way, by_seed in scores.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=ALL_RECORDS, help="of each class")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="align_fl_server")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        rows += one_seed(arguments.records, seed)
        keep(arguments.name, rows, records_per_class=arguments.records)
    show(f"two latents, {arguments.records} records of a class", summary(rows))


if __name__ == "__main__":
    main()
