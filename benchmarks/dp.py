"""DP-SGD: a private step over a plain one of the 1.09M-parameter MLP VAE, in fedloom and in Opacus, with peak memory.

    python benchmarks/dp.py [--device cuda] [--silos 10 20] [--batches 32 256] [--precisions float32]
    python benchmarks/dp.py --device cpu [--repeats 3]

On a GPU fedloom's fused engine trains all silos at once, and the loops train one. On a CPU each contender is the engine
that ``auto`` chooses for one thread, or a loop, in a process of its own and in turns; what counts there is processor
time, because the clock says more about who else is at work. The loops have their records in memory and batches of
exactly the expected size, which spares Opacus its data loader.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common import keep, prepared, show
from common import seconds_of as clock_seconds_of
from fedloom.engines.base import Engine, FederationState, Job, site_of
from fedloom.engines.choice import make_engine
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.federation.rounds import RoundContext

BARS = {"cuda": 1.5, "cpu": 2.5}
STEPS = {"cuda": {32: 94, 256: 47}, "cpu": {32: 30, 256: 15}}  # of a silo in a round, by batch
PRIVATE = (
    "privacy.mechanism=dp-sgd",
    "privacy.noise_multiplier=1",
    "privacy.clip=1",
    "privacy.accountant=rdp",
    "privacy.noise=test",  # engines are driven without a ledger, which would give each round its secret
)
Step = Callable[[Tensor, Tensor], None]


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """By the clock on a GPU, in processor time on a CPU."""
    if device.type == "cuda":
        return clock_seconds_of(work)
    start = time.process_time()
    work()
    return time.process_time() - start


class Model(nn.Module):
    """Losses of the VAE that fedloom trains, as a function of images and noise."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = vae.encoder, vae.decoder

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        logits = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        nll = functional.binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1)
        return nll + 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum(1)


def plain_loop(model: Model, batch: int) -> Step:  # noqa: ARG001 - all loops are made alike
    """What everybody writes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x: Tensor, noise: Tensor) -> None:
        optimizer.zero_grad()
        model(x, noise).mean().backward()
        optimizer.step()

    return step


def opacus_hooks(model: Model, batch: int) -> Step:
    """A gradient for every example, written out by hooks."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.Adam(module.parameters(), lr=1e-3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=batch,
    )

    def step(x: Tensor, noise: Tensor) -> None:
        optimizer.zero_grad()
        module(x, noise).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: Model, batch: int) -> Step:
    """Norms first, then a second backward pass of the clipped losses."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.Adam(module.parameters(), lr=1e-3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=batch,
    )

    def step(x: Tensor, noise: Tensor) -> None:
        optimizer.zero_grad()
        DPTensorFastGradientClipping(module, optimizer, module(x, noise)).backward()
        optimizer.step()

    return step


LOOPS: dict[str, Callable[[Model, int], Step]] = {
    "plain loop": plain_loop,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost clipping": opacus_ghost,
}


def loop_microseconds(name: str, batch: int, device: torch.device) -> float:
    """Per step of one model."""
    _, trainer, _ = prepared("mlp", 1, batch)
    make = LOOPS[name](Model(trainer.method.build(site_of(trainer.federation, 0))).to(device), batch)
    images = torch.randint(0, 256, (8 * batch, 1, 28, 28), dtype=torch.uint8, device=device)
    steps = STEPS[device.type][batch]

    def train(count: int) -> None:
        for _ in range(count):
            index = torch.randint(0, len(images), (batch,), device=device)
            make(images[index].float() / 255, torch.randn(batch, 40, device=device))

    train(5)
    return min(seconds_of(lambda: train(steps), device) for _ in range(3)) / steps * 1e6


def round_microseconds(engine: Engine, state: FederationState, silos: int, steps: int, device: torch.device) -> float:
    """Per silo-step of whole rounds: sending, training, merging."""
    context = RoundContext(1, 3, tuple(range(silos)))
    engine.round(Job(state, context, lambda _: None))
    best = min(seconds_of(lambda: engine.round(Job(state, context, lambda _: None)), device) for _ in range(3))
    engine.close()
    return best / (steps * silos) * 1e6


def fused_microseconds(private: bool, silos: int, batch: int, options: FusedOptions) -> float:
    """The fused engine's."""
    steps = STEPS[options.device.type][batch]
    settings = (f"local.batch_size={batch}", "rounds=3", *(PRIVATE if private else ()))
    _, trainer, state = prepared("mlp", silos, batch * steps, *settings)
    return round_microseconds(FusedEngine(trainer, options), state, silos, steps, options.device)


def chosen_microseconds(private: bool, batch: int) -> tuple[float, str]:
    """That of the engine that is chosen for one silo on a CPU, and its name in words."""
    steps = STEPS["cpu"][batch]
    settings = (
        f"local.batch_size={batch}",
        "rounds=20",
        "engine.device=cpu",
        "engine.threads=1",
        *(PRIVATE if private else ()),
    )
    _, trainer, state = prepared("mlp", 1, batch * steps, *settings)
    engine = make_engine(trainer)
    words = engine.describe()
    return round_microseconds(engine, state, 1, steps, torch.device("cpu")), words


# On a GPU: one process, peak memory by the allocator.


def with_memory(work: Callable[..., float], *arguments: Any) -> tuple[float, float]:
    """What the work gives, and the most device memory that it held, in MB."""
    gc.collect()  # the contender before may still hold some
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = work(*arguments)
    return found, (torch.cuda.max_memory_allocated() - before) / 1e6


def on_gpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    rows = []
    for batch in arguments.batches:
        plain, *others = (with_memory(loop_microseconds, name, batch, device) for name in LOOPS)
        for name, found in zip(list(LOOPS)[1:], others, strict=True):
            rows.append(row_of(name, batch, 1, "float32", False, plain, found))
        for silos in arguments.silos:
            for precision in arguments.precisions:
                for compiled in arguments.compiled:
                    options = FusedOptions(device, precision, compiled=compiled == "yes")
                    pair = [
                        with_memory(fused_microseconds, private, silos, batch, options) for private in (False, True)
                    ]
                    rows.append(row_of("fedloom", batch, silos, precision, compiled == "yes", *pair))
                    print(rows[-1], flush=True)
    return rows


def row_of(
    contender: str,
    batch: int,
    silos: int,
    precision: str,
    compiled: bool,
    plain: tuple[float, float],
    private: tuple[float, float],
) -> dict[str, Any]:
    return {
        "contender": contender,
        "batch": batch,
        "silos": silos,
        "precision": precision,
        "compiled": compiled,
        "plain_us": plain[0],
        "private_us": private[0],
        "private_over_plain": private[0] / plain[0],
        "plain_mb": plain[1],
        "private_mb": private[1],
    }


# On a CPU: a process for each contender, peak memory as the operating system sees it, Python and torch included.

CPU_CONTENDERS = (*LOOPS, "fedloom, plain", "fedloom, private")


def one_contender(name: str, batch: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if name in LOOPS:
        found, words = loop_microseconds(name, batch, torch.device("cpu")), "one thread"
    else:
        found, words = chosen_microseconds(name == "fedloom, private", batch)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"us": found, "memory": memory, "words": words}


def on_cpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for batch in arguments.batches:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CPU_CONTENDERS}
        for _ in range(arguments.repeats):
            for name in CPU_CONTENDERS:
                command = [sys.executable, __file__, "--contender", name, "--batches", str(batch)]
                environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
                done = subprocess.run(
                    command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
                )
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(batch, name, found[name][-1], flush=True)
        middle = {
            name: (statistics.median(r["us"] for r in runs), max(r["memory"] for r in runs))
            for name, runs in found.items()
        }
        for name in list(LOOPS)[1:]:
            rows.append(row_of(name, batch, 1, "float32", False, middle["plain loop"], middle[name]))
        row = row_of("fedloom", batch, 1, "float32", False, middle["fedloom, plain"], middle["fedloom, private"])
        rows.append(row | {"engine": found["fedloom, private"][-1]["words"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--silos", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256], choices=[32, 256])
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--compiled", nargs="+", default=["no"], help="no, yes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contender", choices=CPU_CONTENDERS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus|torch")
    if arguments.contender:
        print(json.dumps(one_contender(arguments.contender, arguments.batches[0])))
        return
    rows = {"cuda": on_gpu, "cpu": on_cpu}[arguments.device](arguments)
    show(f"a private step over a plain one on {arguments.device}", [{k: r[k] for k in rows[0]} for r in rows])
    bar = BARS[arguments.device]
    keep(f"dp-{arguments.device}", rows, bar=bar)
    missed = [row for row in rows if row["contender"] == "fedloom" and row["private_over_plain"] > bar]
    print(f"\nbar: at most {bar}; missed by {len(missed)} of fedloom's rows")


if __name__ == "__main__":
    main()
