"""What a run would take on several GPUs: arithmetic from what was measured, with everything that it assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedloom.engines.choice import COPIES
from fedloom.engines.fused import CUDA_CHUNK
from fedloom.engines.fused_slots import FIXED
from fedloom.experiment.estimation import RunEstimate

# Seconds that one silo adds to a step of a batch of 32, for each million of its parameters, in float32 on an H200: with
# convolutions, and without. From benchmarks/results/local_training-cuda.json and scaling-cuda.json, which have 150 to
# 210 us at 0.58 million, and 16 to 24 us at 1.10 million.
H200 = {True: 310e-6, False: 18e-6}
LINK = 20e9  # bytes a second between GPUs: assumed, and never measured
SUM = 8  # bytes of a number in the sums that are merged


@dataclass(frozen=True)
class Projection:
    """A run on so many GPUs."""

    gpus: int
    seconds_per_round: float
    memory: int  # bytes of each GPU
    bytes_between: int  # that GPUs send each other in a round


def project(found: RunEstimate, gpus: int) -> Projection:
    """The run of this estimate on so many GPUs."""
    share = math.ceil(found.silos_per_round / gpus)  # of the silos, on the busiest
    steps = found.steps_per_round / max(1, found.silos_per_round)  # of each
    training = _unit(found, steps) * _work(found, share) * steps
    between = 2 * (gpus - 1) * SUM * found.parameters
    at_once = min(share, found.chunk or CUDA_CHUNK)
    return Projection(
        gpus=gpus,
        seconds_per_round=found.seconds_beside_steps + training + between / gpus / LINK,
        memory=at_once * (COPIES * 4 * found.parameters_of_a_silo + found.bytes_of_a_silo),
        bytes_between=between,
    )


def assumptions(found: RunEstimate) -> list[str]:
    """All that :func:`project` takes for granted, a sentence each."""
    fixed = FIXED[found.convolutions]
    rate = H200[found.convolutions]
    if found.chunk:
        speed = f"each GPU is as fast as this one, which took {found.seconds_per_round:.2g} s for a round"
    else:
        size = found.parameters_of_a_silo / 1e6
        speed = (
            f"each GPU is an H200, on which a silo with batches of 32 adds {1e6 * rate * size:.3g} us to a step "
            f"({1e6 * rate:.0f} us for each of its {size:.3g} million parameters; measured within a third)"
        )
    return [
        speed,
        f"silos are shared out evenly, {found.chunk or CUDA_CHUNK} at most train at once, and beside them a step costs "
        f"what {fixed} more would add",
        f"{found.seconds_beside_steps:.2g} s of a round are beside the steps, as here, on one of the GPUs",
        f"merging sends {SUM} bytes a parameter at {LINK / 1e9:.0f} GB/s, which is assumed and was never measured",
        f"a GPU holds {COPIES} copies of the weights of each silo that trains, and its records",
    ]


def _unit(found: RunEstimate, steps: float) -> float:
    """Seconds of a silo's step where nobody waits: as measured on this GPU, else on an H200."""
    if not found.chunk:
        return H200[found.convolutions] * found.parameters_of_a_silo / 1e6
    work = _work(found, found.silos_per_round) * steps
    return (found.seconds_per_round - found.seconds_beside_steps) / work if work else 0.0


def _work(found: RunEstimate, silos: int) -> float:
    """A step of so many silos, in silos: they themselves, and what each turn costs beside them."""
    return silos + FIXED[found.convolutions] * math.ceil(silos / (found.chunk or CUDA_CHUNK))
