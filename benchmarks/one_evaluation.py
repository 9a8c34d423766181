"""A run that trains, samples and evaluates on a GPU, against the same checkpoint evaluated on the CPU.

python benchmarks/one_evaluation.py [--device cuda] [--samples 2000] [--backbone pixels]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
import warnings
from pathlib import Path

import torch

from common import keep, show
from fedloom import load_config, train
from fedloom.errors import FedloomWarning
from fedloom.evaluation.metric import METRICS
from fedloom.experiment import Run
from fedloom.runs.metrics import is_metric

NEEDED = {"probe": "sklearn", "inception-score": "efficientnet_lite_pytorch"}


def trained(folder: Path, device: str, samples: int, backbone: str) -> Run:
    """Two rounds of FissionVAE with two levels on the sample in the package, evaluated after the second."""
    names = [name for name in METRICS if name != "cost" and importlib.util.find_spec(NEEDED.get(name, "torch"))]
    measured = [name for name in names if backbone != "pixels" or name != "inception-score"]
    return train(
        load_config(
            "demo",
            [
                "rounds=2",
                "method.name=fissionvae",
                "method.hierarchy=true",
                "method.prior=wave",
                f"engine.device={device}",
                f"evaluation.metrics={measured}",
                f"evaluation.samples={samples}",
                f"evaluation.backbone={backbone}",
                "evaluation.every=0",
            ],
        ),
        folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--backbone", default="pixels")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FedloomWarning)
    with tempfile.TemporaryDirectory() as name:
        run = trained(Path(name) / "run", options.device, options.samples, options.backbone)
        inside = {key: value for key, value in run.metrics()[-1].items() if is_metric(key)}
        found, seconds = {}, {}
        for device in ("cpu", options.device):
            start = time.perf_counter()
            found[device] = run.evaluate(device=device)
            seconds[device] = time.perf_counter() - start
        # The same samples twice, far more than a run needs: speed, and rounding alone.
        images = {device: run.generator().sample(20_000, group="mnist", device=device).cpu() for device in seconds}
    rows = [
        {"metric": key, "in_the_run": value, "on_the_cpu": found["cpu"][key], "difference": value - found["cpu"][key]}
        for key, value in inside.items()
    ]
    show(f"evaluated on {options.device} in the run, and on the cpu afterwards", rows)
    apart = (images["cpu"] - images[options.device]).abs().max().item()
    print(f"samples differ by {apart:.2g} at most; evaluation took {seconds} s")
    keep(f"one_evaluation-{options.device}", rows, samples_differ_by=apart, seconds=seconds)


if __name__ == "__main__":
    main()
