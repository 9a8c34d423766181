"""Large convolutional networks in lanes: microseconds per silo-step of whole rounds, and what a GPU is busy with.

python benchmarks/lanes.py [--silos 25] [--lanes 4 8 16] [--eager] [--batch 32]

The UNet of images/colour-32 in bf16: 8.0 million parameters, 32 x 32 colour images, AdamW, gradients cut.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import keep, prepared, seconds_of, show
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.federation.rounds import RoundContext

STEPS = 24  # of a silo in a round
SETTINGS = ("local.optimizer=adamw", "local.clip_norm=1.0", "method.flips=true")


def measured(silos: int, batch: int, options: FusedOptions) -> dict[str, Any]:
    """The fastest of two rounds after a first one, and the kernels of one more."""
    _, trainer, start = prepared("unet", silos, batch * STEPS, f"local.batch_size={batch}", *SETTINGS)
    engine = FusedEngine(trainer, options)
    jobs = {0: Job(start, RoundContext(1, 2, tuple(range(silos))), lambda _: None)}
    first = seconds_of(lambda: engine.rounds(jobs))
    best = min(seconds_of(lambda: engine.rounds(jobs)) for _ in range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.rounds(jobs)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    engine.close()
    return {
        "us": best / (STEPS * silos) * 1e6,
        "first_round_s": first,
        "kernels": len(kernels) / (STEPS * silos),
        "kernel_us": sum(event.self_device_time_total for event in kernels) / (STEPS * silos),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=25)
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="not compiled")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for lanes in arguments.lanes:
        options = FusedOptions(torch.device("cuda"), "bf16", compiled=not arguments.eager, lanes=lanes)
        found = measured(arguments.silos, arguments.batch, options)
        rows.append({"lanes": lanes, "compiled": options.compiled, "batch": arguments.batch, **found})
        keep("lanes-cuda", rows)
    show("us per silo-step", rows)


if __name__ == "__main__":
    main()
