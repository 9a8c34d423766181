"""Evaluation: speed of the extractors, what sharing features saves, and a whole evaluation of N + N images.

python benchmarks/evaluation.py [--device cuda] [--images 10000] [--backbones efficientnet-lite0 efficientnet-lite2]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common import keep, seconds_of, show
from fedloom.backbones.base import Backbone
from fedloom.backbones.catalogue import load_backbone
from fedloom.config import EvaluationConfig, load_config
from fedloom.engines.base import initial_state
from fedloom.errors import FedloomWarning
from fedloom.evaluation.metric import METRICS
from fedloom.evaluation.needs import FEATURES
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation, Records, Silo
from fedloom.methods.generator import Generator

SHAPE, CLASSES = (1, 28, 28), 10
REPEATS = 3
SECONDS = 10.0  # about how long a measurement of an extractor takes


def random_federation(images: int) -> Federation:
    """Two groups with half of the images each, held out and in training; speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(2):
        x = torch.randint(0, 256, (images, *SHAPE), generator=generator, dtype=torch.uint8)
        tables.append(Records(x, torch.arange(images) % CLASSES, torch.arange(images) * 2 // images))
    silos = tuple(Silo(name, tables[0].of_group(group)) for group, name in enumerate("ab"))
    return Federation("random", silos, tables[1], ("a", "b"), tuple(map(str, range(CLASSES))))


def prepared(images: int) -> tuple[Experiment, Generator]:
    """An untrained FissionVAE of the size of the Mixed MNIST rows, with priors that differ."""
    config = load_config("demo", ["model.hidden=[512, 256]", "model.latent=40", "method.prior=wave"])
    experiment = Experiment.of(config, random_federation(images))
    state = initial_state(experiment.method, experiment.federation, experiment.config)
    return experiment, Generator(experiment.method, state.server, experiment.federation.groups)


def measure_extractors(backbones: Sequence[str], device: str) -> list[dict[str, Any]]:
    rows = []
    for name in backbones:
        backbone = load_backbone(name, device=device)
        count = backbone.batch_size
        images = random_federation(2 * count).test.values[:count]
        backbone.features(images)  # warm
        once = seconds_of(partial(backbone.features, images))
        batches = max(1, round(SECONDS / REPEATS / once))
        many = images.repeat(batches, 1, 1, 1)
        seconds = sorted(seconds_of(partial(backbone.features, many)) for _ in range(REPEATS))[REPEATS // 2]
        rows.append({"backbone": backbone.name, "device": device, "images/s": len(many) / seconds})
    return rows


class Counted:
    """Counts the images that pass through a backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.images, self._extract = 0, backbone.extract
        backbone.extract = self.extract  # type: ignore[method-assign]

    def extract(self, images: torch.Tensor) -> torch.Tensor:
        self.images += len(images)
        return self._extract(images)


def evaluate(
    experiment: Experiment, generator: Generator, metrics: Sequence[str], settings: EvaluationConfig, device: str
) -> dict[str, tuple[float, int]]:
    """Seconds and extracted images of each metric, in one evaluation that knows nothing from before."""
    config = replace(settings, metrics=tuple(metrics))
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDLOOM_CACHE"] = cache
        evaluator = Evaluator(experiment.federation, config, experiment.streams, torch.device(device))
        counter = Counted(evaluator.real.extractor.backbone)
        evaluation = evaluator.evaluation(generator)
        for name in metrics:
            before = counter.images
            seconds = seconds_of(partial(METRICS[name].measure, evaluation))
            found[name] = seconds, counter.images - before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=0, help="real and generated each; 10000 on a GPU, else 200")
    parser.add_argument("--backbones", nargs="+", default=["efficientnet-lite0", "efficientnet-lite2"])
    options = parser.parse_args()
    images = options.images or (10_000 if options.device.startswith("cuda") else 200)
    warnings.simplefilter("ignore", FedloomWarning)

    extractors = measure_extractors(options.backbones, options.device)
    show("extractors", extractors)

    experiment, generator = prepared(images)
    settings = EvaluationConfig(samples=images // 2, backbone=options.backbones[0])
    on_features = sorted(name for name in METRICS if FEATURES in METRICS[name].needs)
    shared = evaluate(experiment, generator, on_features, settings, options.device)
    apart = [evaluate(experiment, generator, [name], settings, options.device)[name] for name in on_features]
    sharing = [
        {"features": name, "seconds": sum(s for s, _ in runs), "images extracted": sum(n for _, n in runs)}
        for name, runs in (("shared", list(shared.values())), ("for each metric anew", apart))
    ]
    show(f"{', '.join(on_features)} of {images:,} + {images:,} images", sharing)
    ratio = sharing[1]["seconds"] / sharing[0]["seconds"]
    print(f"sharing is {ratio:.2f} times as fast")

    names = [name for name in METRICS if name != "probe" or importlib.util.find_spec("sklearn")]
    parts = evaluate(experiment, generator, names, settings, options.device)
    whole = [{"metric": name, "seconds": seconds, "images extracted": n} for name, (seconds, n) in parts.items()]
    show(f"a whole evaluation of {images:,} + {images:,} images", whole)
    total = sum(row["seconds"] for row in whole)
    print(f"{total:.1f} s in all")
    keep(
        f"evaluation-{options.device}",
        whole,
        images=images,
        extractors=extractors,
        sharing=sharing,
        sharing_ratio=ratio,
        seconds=total,
    )


if __name__ == "__main__":
    main()
