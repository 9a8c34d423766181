"""On the CPU: fedloom against the loop as people write it, and against the best loop that can be written by hand.

    python benchmarks/versus_loop.py [--repeats 5]

Each contender runs in a process of its own with nobody's thread settings, in turns, so that a busy machine is unfair to
all alike; only the ratios mean anything: of each contender's best run, and the median, least and most of the turns. All
train the 1.09M-parameter VAE on batches of 32. People write the loop with a DataLoader, as PyTorch's own VAE example
does; the same loop with its records in memory stands beside it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STEPS = 188  # an epoch of 6,000 images, as in the paper


def loop(threads: int, fused: bool, steps: int, loader: bool = False) -> float:
    """Seconds per step of a plain loop, with its records in memory or from a DataLoader."""
    import torch
    from torch import nn
    from torch.nn import functional

    if threads:
        torch.set_num_threads(threads)
    encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 80))
    decoder = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 784))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=fused)
    images = torch.randint(0, 256, (32 * STEPS, 784), dtype=torch.uint8)

    class Records(torch.utils.data.Dataset[torch.Tensor]):
        """Stored images, made into floats when they are asked for."""

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> torch.Tensor:
            return images[index].float() / 255

    def batches(count: int) -> Iterator[torch.Tensor]:
        if loader:
            epochs = (torch.utils.data.DataLoader(Records(), batch_size=32, shuffle=True) for _ in itertools.count())
            yield from itertools.islice(itertools.chain.from_iterable(epochs), count)
            return
        order = torch.randperm(len(images))
        for step in range(count):
            first = step * 32 % len(images)
            yield images[order[first : first + 32]].float() / 255

    def train(count: int) -> None:
        for x in batches(count):
            mean, log_variance = encoder(x).chunk(2, dim=1)
            output = decoder(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean))
            nll = functional.binary_cross_entropy_with_logits(output, x, reduction="sum")
            kl = 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum()
            optimizer.zero_grad()
            ((nll + kl) / 32).backward()
            optimizer.step()

    train(5)
    start = time.perf_counter()
    train(steps)
    return (time.perf_counter() - start) / steps


def fedloom_round() -> float:
    """Seconds per silo-step of whole rounds of the engine that ``auto`` chooses: sending, training, merging."""
    from common import prepared
    from fedloom.engines.base import Job
    from fedloom.engines.choice import make_engine
    from fedloom.federation.rounds import RoundContext

    silos = 2
    _, trainer, state = prepared("mlp", silos, 32 * STEPS, "rounds=70", "engine.name=auto", "engine.device=cpu")
    engine = make_engine(trainer)
    print(engine.describe(), file=sys.stderr)
    context = RoundContext(1, 70, tuple(range(silos)))
    engine.round(Job(state, context, lambda _: None))
    start = time.perf_counter()
    engine.round(Job(state, context, lambda _: None))
    seconds = (time.perf_counter() - start) / (silos * STEPS)
    engine.close()
    return seconds


CONTENDERS = {
    # Default threads, default Adam.
    "as people write it, DataLoader": lambda: loop(0, fused=False, steps=15, loader=True),
    "as people write it, in memory": lambda: loop(0, fused=False, steps=15),
    "best hand-written": lambda: loop(1, fused=True, steps=2 * STEPS),  # one thread, fused Adam
    "fedloom": fedloom_round,
}


def measured(name: str) -> float:
    """One contender in a fresh process with nobody's thread settings."""
    from common import untouched_environment

    here, environment = Path(__file__), untouched_environment()
    command = [sys.executable, str(here), "--contender", name]
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True, check=True)
    print(f"{name}: {done.stdout.strip()} s a step {done.stderr.strip()[-80:]}", flush=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.contender:
        print(CONTENDERS[arguments.contender]())
        return
    from common import keep, show

    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.repeats):
        for name in CONTENDERS:
            seconds[name].append(measured(name))
    ours = seconds["fedloom"]
    rows = [
        {
            "contender": name,
            "best_over_fedlooms_best": min(values) / min(ours),
            "median_of_turns": statistics.median(v / o for v, o in zip(values, ours, strict=True)),
            "least": min(v / o for v, o in zip(values, ours, strict=True)),
            "most": max(v / o for v, o in zip(values, ours, strict=True)),
        }
        for name, values in seconds.items()
    ]
    show("seconds a step, in units of fedloom's", rows)
    keep("versus_loop-cpu", rows)


if __name__ == "__main__":
    main()
