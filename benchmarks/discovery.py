"""How well groups are found that nobody named, and how good what is trained with them is; over three seeds.

    python benchmarks/discovery.py index      the adjusted Rand index against the truth
    python benchmarks/discovery.py quality    the held-out loss of FissionVAE+D beside that with known groups

On the samples in the package, and on CHARM or its stand-in where that is there. "found" is discovery.by = "moments",
"loss" is discovery.by = "loss". For comparison silos train small autoencoders without privacy, which are clustered by
their weights, or of which every silo takes the best (IFCA, Ghosh et al. 2020, as published, three restarts).
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common import keep, show
from fedloom.config import Config, load_config
from fedloom.discovery.clustering import hierarchy
from fedloom.discovery.grouping import names_of, with_groups
from fedloom.engines.before import simulated
from fedloom.errors import DataError, FedloomWarning
from fedloom.experiment import Experiment, train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.privacy.noise import StreamNoise
from fedloom.streams import Streams

SEEDS = (1, 2, 3)
EPSILONS = (0.0, 3.0, 1.0)  # 0: no mechanism
# Of IFCA; clustering of weights is after ROUNDS * STEPS steps at once.
ROUNDS, STEPS, BATCH, HIDDEN, RESTARTS, LOOKED_AT = 6, 15, 64, 32, 3, 200
Case = tuple[Federation, list[int]]  # and the true group of each silo; -1: it has records of several


def config_of(seed: int, *assignments: str) -> Config:
    return load_config("demo", [f"seed={seed}", "participation.rate=1.0", *assignments])


def built(seed: int, *assignments: str) -> Federation:
    return build_federation(config_of(seed, *assignments).data, Streams(seed))


def mixed_mnist(seed: int, records: int = 0) -> Case:
    found = built(seed, f"data.records_per_silo={records}")
    return found, [silo.groups[0] for silo in found.silos]


def mixed_silos(seed: int, records: int = 0) -> Case:
    """Two of ten silos hold half of each group."""
    found, truth = mixed_mnist(seed, records)
    silos = list(found.silos)
    for one, other in ((0, 5),):
        first, second = silos[one].train, silos[other].train
        halves, rest = torch.arange(len(first)).chunk(2)
        silos[one] = replace(silos[one], train=concatenate([first.take(halves), second.take(halves)]))
        silos[other] = replace(silos[other], train=concatenate([first.take(rest), second.take(rest)]))
        truth[one] = truth[other] = -1
    return replace(found, silos=tuple(silos)), truth


def rotated(seed: int) -> Case:
    """MNIST, upright and turned by 90, 180 and 270 degrees: four silos each."""
    found = built(seed, "data.source=mnist-sample", "data.partition=iid", "data.silos=16")
    turns = [number % 4 for number in range(16)]
    silos = [
        replace(silo, train=replace(silo.train, x=torch.rot90(silo.train.x, turn, (-2, -1)).contiguous()))
        for silo, turn in zip(found.silos, turns, strict=True)
    ]
    return replace(found, silos=tuple(silos)), turns


def populations(seed: int) -> Case:
    """Adult: five silos of people under 37, five of those of 37 and more."""
    found = built(seed, "data.source=adult-sample", "data.partition=iid", "data.silos=1")
    everybody = found.silos[0].train
    older = everybody.x[:, 0] >= 37
    parts: list[tuple[Records, int]] = []
    for group in (0, 1):
        rows = torch.nonzero(older == bool(group)).flatten()
        parts += [(everybody.take(part), group) for part in torch.tensor_split(rows, 5)]
    silos = tuple(Silo(f"silo-{number}", part) for number, (part, _) in enumerate(parts))
    return replace(found, silos=silos), [group for _, group in parts]


def no_groups(seed: int) -> Case:
    found = built(seed, "data.source=mnist-sample", "data.partition=iid", "data.silos=10")
    return found, [0] * 10


def charm(seed: int) -> Case:
    """Five domains of colour pictures: four silos each."""
    found = built(seed, "data.source=charm", "data.silos=4", "data.records_per_silo=600")
    return found, [silo.groups[0] for silo in found.silos]


CASES: dict[str, Callable[[int], Case]] = {
    "Mixed MNIST": mixed_mnist,
    "Mixed MNIST, 400 records a silo": lambda seed: mixed_mnist(seed, 400),
    "Mixed MNIST, 2 of 10 silos mixed": mixed_silos,
    "rotated MNIST": rotated,
    "Adult by age": populations,
    "MNIST, no groups": no_groups,
    "CHARM": charm,
}
QUALITY_CASES: dict[str, Callable[[int], Case]] = {
    "Mixed MNIST": lambda seed: mixed_mnist(seed, 400),
    "2 of 10 silos mixed": lambda seed: mixed_silos(seed, 400),
}
QUALITY = ("rounds=25", "local.learning_rate=3e-3", "evaluation.metrics=['likelihood']", "evaluation.every=0")
ALONE = "sharing.scopes={encoder='group'}"


def index_of(truth: list[int], labels: list[int]) -> float:
    """The adjusted Rand index over silos of a single group."""
    from sklearn.metrics import adjusted_rand_score

    pairs = [(true, label) for true, label in zip(truth, labels, strict=True) if true >= 0]
    return float(adjusted_rand_score(*zip(*pairs, strict=True)))


def discovered(case: Case, seed: int, epsilon: float, *assignments: str) -> list[int]:
    """By the release of a run with these settings, whose training takes the rest of the budget."""
    network = "model.likelihood=auto"
    private = (f"privacy.epsilon={epsilon}", "privacy.mechanism=dp-sgd") if epsilon else ()
    config = config_of(seed, "data.groups=discover", "rounds=5", network, *private, *assignments)
    experiment = Experiment.of(config, case[0])
    secrets = {index: StreamNoise(Streams(1000 * seed + index)) for index in range(len(case[0]))}
    return list(simulated(experiment.trainer, secrets)[1].labels)


def tables_of(federation: Federation) -> list[Tensor]:
    """Each silo's records as vectors, pictures shrunk to 8 x 8 as in what is released."""
    values = [silo.train.values for silo in federation.silos]
    return [(functional.adaptive_avg_pool2d(x, 8) if x.dim() == 4 else x).flatten(1) for x in values]


def autoencoder(width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))


def trained(start: nn.Module, x: Tensor, steps: int, seed: int) -> nn.Module:
    model = autoencoder(x.shape[1], 0)
    model.load_state_dict(start.state_dict())
    optimiser, generator = torch.optim.Adam(model.parameters(), 1e-3), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = x[torch.randint(len(x), (BATCH,), generator=generator)]
        optimiser.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimiser.step()
    return model


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_weights(case: Case, seed: int, groups: int) -> list[int]:
    """Ward's clustering of autoencoders that silos trained alone from one start."""
    tables = tables_of(case[0])
    start = autoencoder(tables[0].shape[1], seed)
    rows = [weights_of(trained(start, x, ROUNDS * STEPS, seed)).numpy() for x in tables]
    return [int(label) for label in hierarchy().fcluster(hierarchy().ward(np.stack(rows)), groups, "maxclust")]


def ifca(case: Case, seed: int, groups: int) -> list[int]:
    """The restart in which silos' best branches explain their records best."""
    tables = tables_of(case[0])
    return min((_ifca(tables, 100 * seed + turn, groups) for turn in range(RESTARTS)), key=lambda found: found[0])[1]


def _ifca(tables: list[Tensor], seed: int, groups: int) -> tuple[float, list[int]]:
    branches = [autoencoder(tables[0].shape[1], 1000 * seed + group) for group in range(groups)]
    for round in range(ROUNDS + 1):
        losses = [[_loss(branch, x[:LOOKED_AT]) for branch in branches] for x in tables]
        labels = [row.index(min(row)) for row in losses]
        if round == ROUNDS:
            break
        models = [trained(branches[label], x, STEPS, round) for label, x in zip(labels, tables, strict=True)]
        for group in set(labels):
            own = [model.state_dict() for model, label in zip(models, labels, strict=True) if label == group]
            branches[group].load_state_dict({name: sum(each[name] for each in own) / len(own) for name in own[0]})
    return sum(map(min, losses)), labels


def _loss(branch: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((branch(x) - x).square().mean())


def indices() -> None:
    rows = []
    for name, make in CASES.items():
        try:
            make(SEEDS[0])
        except DataError as error:
            print(f"without {name}: {error}")
            continue
        for epsilon in EPSILONS:
            rows.append(_row(name, f"found, epsilon {epsilon:g}" if epsilon else "found", make, epsilon))
        if name not in ("Mixed MNIST", "rotated MNIST", "Adult by age", "CHARM"):
            continue
        for epsilon in (0.0, 3.0):
            title = f"loss, number known, epsilon {epsilon:g}" if epsilon else "loss, number known"
            rows.append(_measured(name, title, make, lambda case, seed, e=epsilon: by_loss(case, seed, e)))
        for title, way in (("weights, number known", by_weights), ("autoencoders by loss, number known", ifca)):
            rows.append(_measured(name, title, make, lambda case, seed, way=way: way(case, seed, _true(case))))
        keep("discovery-cpu", rows, seeds=list(SEEDS))
    for asked in (3, 4):
        rows.append(_row("Mixed MNIST", f"asked for {asked}", mixed_mnist, 0.0, f"discovery.groups={asked}"))
    keep("discovery-cpu", rows, seeds=list(SEEDS))
    show("adjusted Rand index against the true groups", rows)


def by_loss(case: Case, seed: int, epsilon: float) -> list[int]:
    return discovered(case, seed, epsilon, "discovery.by=loss", f"discovery.groups={_true(case)}")


def _true(case: Case) -> int:
    return len(set(case[1]) - {-1})


def _row(name: str, title: str, make: Callable[[int], Case], epsilon: float, *more: str) -> dict[str, object]:
    return _measured(name, title, make, lambda case, seed: discovered(case, seed, epsilon, *more))


def _measured(
    name: str, title: str, make: Callable[[int], Case], way: Callable[[Case, int], list[int]]
) -> dict[str, object]:
    found, seconds = [], 0.0
    for seed in SEEDS:
        case = make(seed)
        start = time.perf_counter()
        labels = way(case, seed)
        seconds += time.perf_counter() - start
        found.append((len(set(labels)), round(index_of(case[1], labels), 3)))
    row = {"case": name, "by": title, "groups": " ".join(str(count) for count, _ in found)}
    row |= {"index": " ".join(f"{index:g}" for _, index in found), "mean": round(mean(i for _, i in found), 3)}
    print(row, f"{seconds:.1f} s", flush=True)
    return row


def held_out_loss(seed: int, federation: Federation, *assignments: str) -> float:
    """The negative ELBO, in nats, of held-out records after a run of FissionVAE+D."""
    config = config_of(seed, *QUALITY, "evaluation.importance_samples=1", *assignments)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FedloomWarning)
        found = train(config, f"{folder}/run", federation).folder.latest_metrics()
    return -next(value for key, value in found.items() if key.startswith("elbo/nats/") and "=" not in key)


def grouped(federation: Federation, labels: Sequence[int], seed: int) -> Federation:
    """The silos in groups of these numbers, in whatever order."""
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    names = names_of(len(order))
    group_of = {silo.name: names[order[label]] for silo, label in zip(federation.silos, labels, strict=True)}
    return with_groups(federation, group_of, Streams(seed))


Labels = Callable[[Case, int], Sequence[int]]
WAYS: dict[str, Labels] = {
    "found": lambda case, seed: discovered(case, seed, 0.0),
    "found, epsilon 3": lambda case, seed: discovered(case, seed, 3.0),
    "autoencoders by loss, number known": lambda case, seed: ifca(case, seed, 2),
    "asked for 3": lambda case, seed: discovered(case, seed, 0.0, "discovery.groups=3"),
    "asked for 4": lambda case, seed: discovered(case, seed, 0.0, "discovery.groups=4"),
    "autoencoders by loss, told 4": lambda case, seed: ifca(case, seed, 4),
    "one model": lambda case, _: [0] * len(case[0]),
    "every silo alone": lambda case, _: list(range(len(case[0]))),
}


def known(case: Case, seed: int) -> Federation:
    """With the true groups; of a silo that has records of both, each goes by its own."""
    return case[0] if -1 in case[1] else grouped(case[0], case[1], seed)


def quality() -> None:
    rows: list[dict[str, object]] = []
    for name, make in QUALITY_CASES.items():
        cases = {seed: make(seed) for seed in SEEDS}
        best = {seed: held_out_loss(seed, known(case, seed)) for seed, case in cases.items()}
        loss = round(mean(best.values()), 2)
        rows.append({"case": name, "by": "known", "loss": loss, "% beside known": 0.0, "worst": 0.0})
        measured: dict[tuple[int, ...], float] = {}  # the same groups give the same model
        for way, labels_of in WAYS.items():
            losses = []
            for seed, case in cases.items():
                alone, found = way == "every silo alone", grouped(case[0], labels_of(case, seed), seed)
                key = (seed, *(silo.groups[0] for silo in found.silos))
                if key not in measured:
                    measured[key] = held_out_loss(seed, found, *[ALONE] * alone)
                losses.append(measured[key])
            more = [100 * (loss / best[seed] - 1) for seed, loss in zip(SEEDS, losses, strict=True)]
            row = {"case": name, "by": way, "loss": round(mean(losses), 2)}
            rows.append(row | {"% beside known": round(mean(more), 1), "worst": round(max(more), 1)})
            print(rows[-1], flush=True)
            keep("discovery-quality-cpu", rows, seeds=list(SEEDS), settings=list(QUALITY))
    show("held-out loss of FissionVAE+D in nats, lower is better", rows)


if __name__ == "__main__":
    {"index": indices, "quality": quality}[sys.argv[1]]()
