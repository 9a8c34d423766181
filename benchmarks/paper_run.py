"""The whole FissionVAE+D run of the paper on Mixed MNIST: seconds of training from the first step to the last.

20 silos, 70 rounds, participation 0.5, 5 epochs, batches of 32. The data must be in FEDLOOM_DATA.

    FEDLOOM_DATA=... python benchmarks/paper_run.py [--device cuda] [--precision float32]
"""

from __future__ import annotations

import argparse
import time

import torch

from common import keep, show
from fedloom.config import load_config
from fedloom.engines.base import Job, initial_state
from fedloom.engines.choice import make_engine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.participation import participants
from fedloom.federation.rounds import RoundContext

PRESET = "fissionvae/table1/mixed-mnist/federated/d"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=70)
    arguments = parser.parse_args()
    engine_settings = [f"engine.device={arguments.device}", f"engine.precision={arguments.precision}"]
    config = load_config(PRESET, ["engine.name=fused", f"rounds={arguments.rounds}", *engine_settings])
    experiment = Experiment.of(config)
    trainer = Trainer(config, experiment.method, experiment.federation)
    state = initial_state(trainer.method, trainer.federation, config)
    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")  # the driver's start is nobody's training
    start = time.perf_counter()
    engine = make_engine(trainer)
    ready = time.perf_counter() - start
    steps, losses = 0, {}
    for number in range(1, config.rounds + 1):
        chosen = participants(config.participation, len(trainer.federation), number, trainer.streams)
        state, report = engine.round(Job(state, RoundContext(number, config.rounds, chosen), lambda _: None))
        steps += report.steps
        losses = report.terms
        if number == 1:
            first = time.perf_counter() - start
        if number % 10 == 0:
            print(f"round {number}: {time.perf_counter() - start:.1f} s", flush=True)
    seconds = time.perf_counter() - start
    row = {
        "rounds": config.rounds,
        "precision": arguments.precision,
        "silo_steps": steps,
        "seconds": seconds,
        "ready_s": ready,
        "first_round_s": first,
        "us_per_silo_step": seconds / steps * 1e6,
        "last_loss": losses.get("vae/loss"),
    }
    show(f"{PRESET}: {engine.describe()}", [row])
    keep(f"paper_run-{arguments.precision}", [row], engine=engine.describe())


if __name__ == "__main__":
    main()
