"""The noise of a step of many silos: one generator for all, one for each, and counters written out in torch.

python benchmarks/device_noise.py [--device cpu]

A silo's noise must depend on its own query alone, not on who trains beside it, which rules the first way out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from common import keep, prepared, show
from fedloom.engines.fused_noise import DeviceNoise
from fedloom.engines.fused_stack import Member
from fedloom.privacy.noise import StreamNoise
from fedloom.streams import PackedStreams, Streams

SIZES = ((10, 1_000), (10, 26_104), (128, 26_104), (10, 1_070_360))  # silos, and parameters of each
REPEATS = 10


def seconds_of_a_step(draw: Callable[[], object], device: torch.device) -> float:
    """Of a processor its own time, which other work on the machine leaves alone; of a GPU the clock's."""
    clock, found = (time.perf_counter, []) if device.type == "cuda" else (time.process_time, [])
    for _ in range(REPEATS):
        start = clock()
        draw()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    trainer, rows = prepared("mlp", max(silos for silos, _ in SIZES), 8)[1], []
    for silos, numbers in SIZES:
        room = torch.zeros(silos, numbers, device=device)
        secrets = [StreamNoise(Streams(silo)) for silo in range(silos)]
        each = DeviceNoise([Member(0, silo, trainer) for silo in range(silos)], secrets, 1, [room], device)
        streams, index = PackedStreams(tuple(range(silos))), torch.arange(silos)
        together = torch.Generator(device).manual_seed(1)
        ways: dict[str, Callable[[], object]] = {
            "one": lambda: room.normal_(generator=together),  # noqa: B023
            "one_each": lambda: each.draw(silos),  # noqa: B023
            "counters": lambda: streams.normal("noise", 1, numbers, silo=index, step=3, device=device),  # noqa: B023
        }
        taken = {way: seconds_of_a_step(draw, device) for way, draw in ways.items()}
        rows.append({"silos": silos, "numbers": numbers, "one_ms": taken["one"] * 1e3})
        rows[-1] |= {f"{way}_over_one": taken[way] / taken["one"] for way in ("one_each", "counters")}
        print(rows[-1], flush=True)
    show(f"noise of a step on {device.type}, against one generator for all silos", rows)
    keep(f"device_noise-{device.type}", rows)


if __name__ == "__main__":
    main()
