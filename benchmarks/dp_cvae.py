"""Measure generators of labelled embeddings at a true epsilon, and write down every figure of papers/dp-cvae.

    fedloom embed cifar10.npz --projection head --dimension 256 --out embeddings.npz
    python benchmarks/dp_cvae.py embeddings.npz --set bars mixture

Settings were chosen on other held-out records. So the figures come from a fresh split: the last 5,000
training records are scored and never trained on, and the former held-out records are trained on in their place. Rows
that are in the results already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common import RESULTS, keep
from fedloom.config import Config
from fedloom.downstream.heads import Heads
from fedloom.downstream.stage import downstream
from fedloom.evaluation.classification import confusion, score
from fedloom.experiment import Run, train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.settings import override, parse
from fedloom.streams import Streams
from make_charm import write

NAME = "dp_cvae-cpu"
SCORED = 5000  # records of the fresh held-out part
SYNTHETIC = 50_000
SEEDS = (11, 12, 13)
COMMON = (
    *("data.source=embeddings", "data.partition=iid", "data.silos=10", "data.validation=0.2"),
    *("privacy.delta=1e-5", "evaluation.metrics=[]", "engine.checkpoint_every=1000"),
    *("engine.workers=1", "engine.threads=1"),
)
# A linear decoder whose latents are known, and one full-batch step a round.
LINEAR = ("method.labels=uniform", "model.posterior=closed-form", "model.hidden=[]")
STEP = ("local.steps=1", "local.optimizer=sgd")
LOGISTIC = ("privacy.clip=0.6", "local.learning_rate=40")
PAPER = ("rounds=50", "model.hidden=[256, 256]", "model.latent=100", "local.epochs=5", "local.batch_size=256")
SHORT = (*PAPER, "rounds=10", "local.learning_rate=1e-3")
HEAD = ("method.name=linear_head", "rounds=50", "local.epochs=5", "local.batch_size=128", "local.learning_rate=1e-2")
CONDITIONED = "data.condition=habitat"
METHODS: dict[str, tuple[str, ...]] = {
    "moments": ("method.name=moments", "rounds=1"),
    "refined_moments": ("method.name=refined_moments", "rounds=22"),
    "dp_cvae, linear": ("method.name=dp_cvae", *LINEAR, *STEP),
    "dp_cvae, paper's size": ("method.name=dp_cvae", *PAPER, "privacy.clip=1.5", "local.keep_optimizer=true"),
    "cvae, reference loss": ("method.name=dp_cvae", *SHORT, "method.loss=reference"),
    "cvae, correct loss": ("method.name=dp_cvae", *SHORT),
    "cvae, correct loss, 50 rounds": ("method.name=dp_cvae", *PAPER),
    "cvae, small": ("method.name=dp_cvae", *SHORT, "model.hidden=[256]", "model.latent=16"),
    "cvae, small, learned variance": (
        *("method.name=dp_cvae", *SHORT, "model.hidden=[256]", "model.latent=16"),
        "method.prior_variance=learned",
    ),
    "cvae, small, variance of each class": (
        *("method.name=dp_cvae", *SHORT, "model.hidden=[256]", "model.latent=16"),
        "method.prior_variance=class",
    ),
    # Without noise there is nothing to save: batches, Adam, more latents.
    "cvae, linear": (
        *("method.name=dp_cvae", *LINEAR, "rounds=10", "local.epochs=5", "local.batch_size=256"),
        *("model.latent=32", "local.learning_rate=3e-3"),
    ),
    "dp_cgan": ("method.name=dp_cgan", *SHORT, "privacy.clip=1.5"),
    "flow": ("method.name=flow", *SHORT, "privacy.clip=1.5", "local.keep_optimizer=true"),
    "fedavg": HEAD,
    "fedprox": (*HEAD, "method.proximal=0.01"),
    "dp logistic regression": ("method.name=linear_head", *STEP, "rounds=50", *LOGISTIC),
    "moments, conditioned": ("method.name=moments", "rounds=1", CONDITIONED),
    "moments, conditioned, exponent 0": ("method.name=moments", "rounds=1", CONDITIONED, "method.label_exponent=0"),
    "dp_cvae, linear, conditioned": ("method.name=dp_cvae", *LINEAR, *STEP, CONDITIONED),
}
STEPS = {2500: (25, 4, 1), 10_000: (25, 8, 2), np.inf: (50, 16, 2)}  # rounds, latents, rate by epsilon times records
# Draws about the decoder's mean; the paper takes the mean itself.
PATHWAYS = dict.fromkeys(("dp_cvae, linear", "dp_cvae, linear, conditioned", "cvae, linear"), "x")
TAIL = 20  # times as many records of the first class as of the last
EXPONENTS = (0.0, 0.5, 1.0)
# Living beings or machines, in the air or on land: of each the classes, and how many records there are to train on.
ANIMAL, MACHINE = "animal", "machine"
AIR, LAND = "air", "land"
KINDS = {
    (ANIMAL, LAND): ((3, 4, 5, 7), 1900),  # cat, deer, dog, horse
    (ANIMAL, AIR): ((2,), 100),  # bird
    (MACHINE, AIR): ((0,), 1900),  # airplane
    (MACHINE, LAND): ((1, 9), 100),  # automobile, truck
}


@dataclass(frozen=True)
class Row:
    """One run."""

    method: str
    records: int = 1600  # of each silo
    epsilon: float = 1.0  # infinite: none
    trust: str = "local"
    partition: str = "iid"
    data: str = "all"

    def config(self, data: Path, seed: int) -> Config:
        size = round(self.records / 0.8) if self.records == 160 else 0
        settings = [*COMMON, *METHODS[self.method], f"data.path={data}", f"data.records_per_silo={size}"]
        settings += [f"seed={seed}", f"data.partition={self.partition}", f"privacy.trust={self.trust}"]
        if np.isfinite(self.epsilon):
            settings += ["privacy.mechanism=dp-sgd", f"privacy.epsilon={self.epsilon}"]
        else:
            settings = [setting for setting in settings if not setting.startswith("privacy.")]
        if "local.steps=1" in settings:
            settings += [f"local.batch_size={self.records}", *(self.steps() if LINEAR[1] in settings else ())]
        if self.data == "habitat":
            settings += ["data.silos=5"]
        return parse(Config, override({}, settings))

    def steps(self) -> list[str]:
        """More of them, and more latents, where noise is small: public, and chosen on records of no figure."""
        signal = self.epsilon * self.records * (10**0.5 if self.trust == "distributed" else 1.0)
        rounds, latent, rate = next(found for bound, found in STEPS.items() if signal < bound or bound == np.inf)
        classes = 10 if self.data != "habitat" else 4 if CONDITIONED in METHODS[self.method] else 2
        rate *= classes / 10  # chosen for ten: the larger a class's share of the records, the larger its gradient
        return [f"rounds={rounds}", f"model.latent={latent}", f"local.learning_rate={rate:g}"]

    def facts(self, seed: int) -> dict[str, Any]:
        epsilon = self.epsilon if np.isfinite(self.epsilon) else None
        return {
            "method": self.method,
            "records": self.records,
            "epsilon": epsilon,
            "trust": self.trust,
            "partition": self.partition,
            "seed": seed,
            **({} if self.data == "all" else {"data": self.data}),
        }


CELLS = [(1600, 1.0, "local"), (1600, 1.0, "distributed"), (1600, 4.0, "distributed"), (160, 4.0, "distributed")]
HOUSE = ("refined_moments", "moments", "dp_cvae, linear")
SETS: dict[str, list[tuple[Row, int]]] = {
    "bars": [(Row(name, *cell), seed) for name in HOUSE for seed in SEEDS for cell in CELLS],
    "mixture": [
        (Row("refined_moments", 160, 4.0, trust, "dirichlet"), seed)
        for seed in SEEDS
        for trust in ("distributed", "local")
    ],
    "collapse": [(Row(name, 1600, np.inf), 11) for name in METHODS if name.startswith("cvae,")],
    "curve": [
        (Row(name, 1600, epsilon), 11)
        for epsilon, name in itertools.product((0.1, 0.5, 1.0, 2.0, 4.0, 8.0, np.inf), HOUSE)
        if np.isfinite(epsilon) or name != "dp_cvae, linear"  # whose steps are for clipped gradients
    ],
    "paper": [(Row("dp_cvae, paper's size"), 11)],
    "long-tail": [
        (Row(name, 545, 4.0, "distributed", data="long-tail"), seed)
        for seed in SEEDS
        for name in ("moments", "refined_moments")
    ],
    "attribute": [
        (Row(name, 640, 4.0, "distributed", data="habitat"), seed)
        for seed in SEEDS
        for name in ("moments", "dp_cvae, linear", *(name for name in METHODS if CONDITIONED in METHODS[name]))
    ],
    "heads": [
        *((Row(name, 1600, np.inf), seed) for seed in SEEDS for name in ("fedavg", "fedprox")),
        *((Row("dp logistic regression", *cell), seed) for seed in SEEDS for cell in CELLS),
        *((Row(name, 160, np.inf, partition="dirichlet"), seed) for seed in SEEDS for name in ("fedavg", "fedprox")),
    ],
    "generators": [
        *((Row("cvae, linear", 1600, np.inf), seed) for seed in SEEDS),
        *(
            (Row(name, 1600, epsilon), seed)
            for seed in SEEDS
            for name in ("dp_cgan", "flow")
            for epsilon in (1, np.inf)
        ),
    ],
}


def fresh_split(source: Path, out: Path) -> None:
    """The last training records and the held-out ones in exchange."""
    with np.load(source, allow_pickle=False) as stored:
        parts: Mapping[str, NDArray[Any]] = {name: stored[name] for name in stored.files}
    kept = len(parts["y_train"]) - SCORED
    swapped = {
        f"{key}_{split}": found
        for key in ("x", "y")
        for split, found in (
            ("train", np.concatenate([parts[f"{key}_test"], parts[f"{key}_train"][:kept]])),
            ("test", parts[f"{key}_train"][kept:]),
        )
    }
    write(out, {"about": parts["about"], **swapped})


def long_tail(source: Path, out: Path) -> None:
    """Of class k one record in 20^(k/9) to train on; held-out records as they are."""
    with np.load(source, allow_pickle=False) as stored:
        parts = {name: stored[name] for name in stored.files}
    classes = np.unique(parts["y_train"])
    kept = [
        np.flatnonzero(parts["y_train"] == label)[: round((parts["y_train"] == label).sum() * TAIL ** -(k / 9))]
        for k, label in enumerate(classes)
    ]
    index = np.sort(np.concatenate(kept))
    write(out, parts | {"x_train": parts["x_train"][index], "y_train": parts["y_train"][index]})


def habitat(source: Path, out: Path) -> None:
    """Animals or machines, with where they are as an attribute, which training records tie to the class."""
    with np.load(source, allow_pickle=False) as stored:
        parts = {name: stored[name] for name in stored.files}
    found: dict[str, NDArray[Any]] = {"about": parts["about"]}
    for split in ("train", "test"):
        y, rows, kinds = parts[f"y_{split}"].astype(np.int64), [], []
        for kind, (classes, count) in KINDS.items():
            members = np.flatnonzero(np.isin(y, classes))[: count if split == "train" else None]
            rows.append(members)
            kinds += [kind] * len(members)
        order = np.argsort(np.concatenate(rows), kind="stable")
        names = np.array(kinds)[order]
        found |= {f"x_{split}": parts[f"x_{split}"][np.concatenate(rows)[order]]}
        found |= {f"y_{split}": names[:, 0], f"attribute_habitat_{split}": names[:, 1]}
    write(out, found)


DATA: dict[str, Callable[[Path, Path], None]] = {"long-tail": long_tail, "habitat": habitat}  # from the fresh split


def tempered(run: Run, federation: Federation) -> dict[str, Any]:
    """Heads on synthetic labels with less and less of a tail; accuracy is that where labels are as in training."""
    test, kinds = federation.test, torch.arange(len(federation.classes))
    shares = torch.bincount(torch.cat([silo.train.y for silo in federation.silos]), minlength=len(kinds)).double()
    found, generator = {}, run.generator()
    for exponent in EXPONENTS:
        flat = replace(generator, method=replace(generator.method, label_exponent=exponent))
        head = Heads(federation, flat, SYNTHETIC, "", run.config.seed, False).common[0].head
        answers = confusion(test.y, head.probabilities(test.x).argmax(dim=1), len(kinds), len(kinds))
        found[str(exponent)] = asdict(score(answers, kinds, shares / shares.sum()))
    return {"exponents": found, "spent": run.metrics()[-1].get("privacy/epsilon/max")}


def measured(run: Run, federation: Federation, row: Row) -> dict[str, Any]:
    """What a head that has learned from synthetic records alone is worth, and how the samples spread."""
    config, last, test = run.config, run.metrics()[-1], federation.test
    common = Heads(federation, run.generator(), SYNTHETIC, PATHWAYS.get(row.method, ""), config.seed, False).common[0]
    assert common.x is not None
    assert common.y is not None
    kinds = torch.arange(len(federation.classes))
    predicted = common.head.probabilities(test.x).argmax(dim=1)
    found = score(confusion(test.y, predicted, len(kinds), len(kinds)), kinds)
    spread = [common.x[common.y == k].var(0).sum() / test.x[test.y == k].var(0).sum() for k in kinds.tolist()]
    return {
        "state": run.folder.status["state"],
        "accuracy": found.accuracy,
        "balanced_accuracy": found.balanced_accuracy,
        "variance": torch.stack(spread).mean().item(),
        "kl": next((value for key, value in last.items() if key.endswith("/kl")), None),
        "spent": last.get("privacy/epsilon/max"),
    }


def mixed(run: Run, row: Row) -> dict[str, Any]:
    """Mixtures beside silos alone."""
    attribute = "habitat" if row.data == "habitat" else ""
    found = downstream(run, attribute=attribute, pathway=PATHWAYS.get(row.method, ""))
    names = ("accuracy", "balanced_accuracy", "worst_group")
    tests = {
        head: {test: {name: scores[test][name] for name in names} for test in scores}
        for head, scores in found["rows"].items()
    }
    if "mixture" in tests and row.partition == "dirichlet":
        balanced = downstream(run, choice="balanced", pathway=PATHWAYS.get(row.method, ""))["rows"]["mixture"]
        tests["mixture, balanced lambda"] = {
            test: {name: balanced[test][name] for name in names} for test in ("global", "silo")
        }
    return {"downstream": tests, "spent": found["epsilon"]}


def found_in(run: Run, federation: Federation, row: Row) -> dict[str, Any]:
    """What a row is about."""
    if row.data == "long-tail":
        return tempered(run, federation)
    alone = row.partition == "iid" and row.data == "all" and bool(run.generator().method.pathways)
    return measured(run, federation, row) if alone else mixed(run, row)


def row_of(row: Row, seed: int, data: Path) -> dict[str, Any]:
    start = time.perf_counter()
    config = row.config(data, seed)
    federation = build_federation(config.data, Streams(seed))
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run")
        trained = time.perf_counter() - start
        found = found_in(run, federation, row)
    return {**row.facts(seed), **found, "seconds": {"training": trained, "all": time.perf_counter() - start}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings", type=Path, help="CIFAR-10 in 256 public directions, from 'fedloom embed'")
    parser.add_argument("--set", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stored = RESULTS / f"{NAME}.json"
    done = json.loads(stored.read_text(encoding="utf-8"))["rows"] if stored.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npz" for name in ("all", *DATA)}
        fresh_split(arguments.embeddings, files["all"])
        for name, make in DATA.items():
            make(files["all"], files[name])
        for row, seed in (each for name in arguments.set for each in SETS[name]):
            facts = row.facts(seed)
            if seed not in arguments.seeds or any(facts.items() <= other.items() for other in done):
                continue
            done.append(row_of(row, seed, files[row.data]))
            keep(NAME, done)
            print({key: value for key, value in done[-1].items() if key != "partition"}, flush=True)


if __name__ == "__main__":
    main()
