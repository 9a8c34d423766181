"""What the benchmarks share: synthetic federations, the machine in words, tables, and results kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.config import Config, load_config
from fedloom.engines.base import FederationState, initial_state
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation, Records, Silo

RESULTS = Path(__file__).parent / "results"
MODELS = {
    # The MLP VAE of FissionVAE's Mixed MNIST rows: 1.10 million parameters.
    "mlp": ((1, 28, 28), ("model.hidden=[512, 256]", "model.latent=40")),
    # A convolutional VAE for 32 x 32 colour images: 0.58 million parameters.
    "conv": (
        (3, 32, 32),
        ("model.network=conv", "model.channels=[32, 64, 128]", "model.latent=40", "model.likelihood=gaussian"),
    ),
    # The DCGAN of FissionVAE's FedGAN rows: 1.73 million parameters, discriminator and generator in turn.
    # The flow-matching UNet of the rows on CHARM: 6.3 million parameters.
    "unet": ((3, 32, 32), ("method.name=fission_flow",)),
    "gan": ((1, 28, 28), ("method.name=fedgan", "model.channels=[64, 128, 256]", "model.latent=100")),
}


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


THREAD_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_")


def untouched_environment() -> dict[str, str]:
    """This environment without thread settings: fedloom sets some for itself when it is imported, here as well."""
    return {name: value for name, value in os.environ.items() if not name.startswith(THREAD_SETTINGS)}


def random_federation(silos: int, records: int, shape: tuple[int, ...]) -> Federation:
    """Silos of two groups in turn, with random images: speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (silos, records, *shape), generator=generator, dtype=torch.uint8)
    label = torch.zeros(records, dtype=torch.int64)
    tables = (Records(images[i], label, torch.full((records,), i % 2)) for i in range(silos))
    members = tuple(Silo(f"silo-{i}", table) for i, table in enumerate(tables))
    return Federation("random", members, members[0].train, ("a", "b"))


def prepared(model: str, silos: int, records: int, *overrides: str) -> tuple[Config, Trainer, FederationState]:
    """A FedVAE of the model's size, or what its settings name, over random images, batches of 32."""
    shape, settings = MODELS[model]
    base = ("method.name=fedvae", "local.batch_size=32", "local.epochs=1", "participation.rate=1.0")
    config = load_config("demo", [*base, *settings, *overrides])
    experiment = Experiment.of(config, random_federation(silos, records, shape))
    return config, experiment.trainer, initial_state(experiment.method, experiment.federation, config)


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall time of a piece of work, with the device's queue empty at both ends."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table of equal rows."""
    cells = [[_text(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(list(rows[0]), *cells, strict=True)]
    print(f"\n{title}")
    for line in [list(rows[0]), *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _text(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def keep(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write results with the machine's description."""
    path = Path(os.environ.get("BENCHMARK_RESULTS", RESULTS)) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": name, "machine": machine(), **facts, "rows": list(rows)}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
