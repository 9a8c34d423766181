"""Local training: microseconds per silo-step of the fused engine against a plain PyTorch loop and the memory floor.

python benchmarks/local_training.py [--device cuda] [--silos 1 10 20 50 100] [--models mlp conv gan]
        [--precisions float32 tf32 bf16] [--convolutions matrix grouped] [--compiled no yes] [--runs 1 4] [--lanes 0 8]

With --runs 4, four runs of so many silos each are packed into one program.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from torch import nn

from common import keep, prepared, seconds_of, show
from fedloom.engines.base import Job, site_of
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.training import Trainer
from fedloom.federation.records import batch_of
from fedloom.federation.rounds import RoundContext
from fedloom.objectives.base import Step

BATCH, RECORDS = 32, 32 * 94
BYTES_PER_PARAMETER = 40  # weights read forwards and backwards, gradient written; Adam reads four numbers, writes three
# A GAN's step passes over both networks more often than that, so that its floor is too low.


def plain_loop(trainer: Trainer, device: torch.device, steps: int) -> None:
    """What everybody writes: one silo, default Adam for each phase, records already on the device."""
    model = trainer.method.build(site_of(trainer.federation, 0)).to(device)
    phases = trainer.method.phases
    optimizers = [
        torch.optim.Adam([p for block in phase.trains for p in model.get_submodule(block).parameters()], lr=1e-3)
        for phase in phases
    ]
    records = trainer.federation.silos[0].train.to(device)
    context = RoundContext(1, 1, (0,))
    order = torch.randperm(len(records), device=device)
    for step in range(steps):
        first = step * BATCH % len(records)
        batch = batch_of(records, order[first : first + BATCH])
        for phase, optimizer in zip(phases, optimizers, strict=True):
            noise = {n: torch.randn(len(batch.x), *s, device=device) for n, s in phase.objective.noise.items()}
            optimizer.zero_grad()
            phase.objective(model, Step(batch, noise, {}, context)).total.mean().backward()
            optimizer.step()


def loop_microseconds(trainer: Trainer, device: torch.device) -> float:
    """Per step; the first steps warm up."""
    steps = 200 if device.type == "cuda" else 20
    plain_loop(trainer, device, steps // 4)
    return min(seconds_of(lambda: plain_loop(trainer, device, steps)) for _ in range(3)) / steps * 1e6


def floor_microseconds(model: nn.Module, device: torch.device) -> float:
    """The least time that the bytes of one silo-step take at the bandwidth of a large copy."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    bandwidth = 2 * source.numel() / min(seconds_of(lambda: target.copy_(source)) for _ in range(5))
    return sum(p.numel() for p in model.parameters()) * BYTES_PER_PARAMETER / bandwidth * 1e6


def fused_microseconds(model: str, silos: int, runs: int, options: FusedOptions, rounds: int) -> tuple[float, float]:
    """Per silo-step of whole rounds (loading, training, merging), and the seconds until the first round was done."""
    members = [prepared(model, silos, RECORDS, f"seed={seed}")[1:] for seed in range(runs)]
    first, *others = [trainer for trainer, _ in members]
    engine = FusedEngine(first, options, packed=others)
    context = RoundContext(1, 2, tuple(range(silos)))
    jobs = {run: Job(start, context, lambda _: None) for run, (_, start) in enumerate(members)}
    steps, work = -(-RECORDS // BATCH) * runs, lambda: engine.rounds(jobs)
    first = seconds_of(work)
    best = min(seconds_of(work) for _ in range(rounds))
    engine.close()
    return best / (steps * silos) * 1e6, first


def variants(model: str, device: torch.device, arguments: argparse.Namespace) -> list[FusedOptions]:
    """Precisions, both kinds of convolution, and compilation, as asked for."""
    convolutions = ["matrix"] if model == "mlp" else arguments.convolutions
    choices = itertools.product(arguments.precisions, convolutions, arguments.compiled, arguments.lanes)
    return [
        FusedOptions(device, p, matrix_convolutions=c == "matrix", compiled=k == "yes", lanes=n)
        for p, c, k, n in choices
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--silos", type=int, nargs="+", default=[1, 10, 20, 25, 50, 100])
    parser.add_argument("--models", nargs="+", default=["mlp", "conv"])
    parser.add_argument("--runs", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--convolutions", nargs="+", default=["matrix", "grouped"])
    parser.add_argument("--compiled", nargs="+", default=["no"], help="no, yes")
    parser.add_argument("--lanes", type=int, nargs="+", default=[0], help="0: all silos of a stack at once")
    parser.add_argument("--name", default="local_training", help="of the file with the results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        _, trainer, _ = prepared(model, 1, RECORDS)
        loop = loop_microseconds(trainer, device)
        floor = floor_microseconds(trainer.method.build(site_of(trainer.federation, 0)), device)
        print(f"{model}: plain loop {loop:.0f} us, memory floor {floor:.1f} us", flush=True)
        for options in variants(model, device, arguments):
            for silos, runs in itertools.product(arguments.silos, arguments.runs):
                row: dict[str, Any] = {
                    "model": model,
                    "precision": options.precision,
                    "convolutions": "-" if model == "mlp" else ("matrix" if options.matrix_convolutions else "grouped"),
                    "compiled": options.compiled,
                    "lanes": options.lanes,
                    "silos": silos,
                    "runs": runs,
                }
                try:
                    found, first = fused_microseconds(model, silos, runs, options, arguments.rounds)
                except Exception as error:  # a variant that fails must not end the others
                    print(f"{row}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                row |= {
                    "us": found,
                    "loop_over_fused": loop / found,
                    "over_floor": found / floor,
                    "first_round_s": first,
                }
                rows.append(row)
                keep(f"{arguments.name}-{device.type}", rows)
        show(f"{model}: us per silo-step", [row for row in rows if row["model"] == model])


if __name__ == "__main__":
    main()
