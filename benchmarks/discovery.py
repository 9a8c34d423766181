"""How well groups are found that nobody named, as the adjusted Rand index against the truth; over three seeds.

    python benchmarks/discovery.py

On the samples in the package. Clustering of weights and IFCA (Ghosh et al. 2020, three restarts) are told the true
number of groups and have no privacy; their silos train a small autoencoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common import keep, show
from fedloom.config import Config, load_config
from fedloom.discovery.clustering import hierarchy
from fedloom.engines.before import found_groups, released
from fedloom.experiment import Experiment
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


def mixed_silos(seed: int) -> Case:
    """Two of ten silos hold half of each group."""
    found, truth = mixed_mnist(seed)
    silos, halves = list(found.silos), torch.arange(600)
    for one, other in ((0, 5),):
        first, second = silos[one].train, silos[other].train
        rest = torch.arange(600, 1200)
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


CASES: dict[str, Callable[[int], Case]] = {
    "Mixed MNIST": mixed_mnist,
    "Mixed MNIST, 400 records a silo": lambda seed: mixed_mnist(seed, 400),
    "Mixed MNIST, 2 of 10 silos mixed": mixed_silos,
    "rotated MNIST": rotated,
    "Adult by age": populations,
    "MNIST, no groups": no_groups,
}


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
    trainer, secrets = experiment.trainer, (StreamNoise(Streams(1000 * seed + n)) for n in range(len(case[0])))
    updates = [released(trainer, silo, secret)[0] for silo, secret in enumerate(secrets)]
    return list(found_groups(trainer, updates).labels)


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
        for epsilon in EPSILONS:
            rows.append(_row(name, f"found, epsilon {epsilon:g}" if epsilon else "found", make, epsilon))
    for asked in (3, 4):
        rows.append(_row("Mixed MNIST", f"asked for {asked}", mixed_mnist, 0.0, f"discovery.groups={asked}"))
    for name in ("Mixed MNIST", "rotated MNIST", "Adult by age"):
        make = CASES[name]
        for title, way in (("weights, number known", by_weights), ("IFCA, number known", ifca)):
            rows.append(_measured(name, title, make, lambda case, seed, way=way: way(case, seed, _true(case))))
            keep("discovery-cpu", rows, seeds=list(SEEDS))
    show("adjusted Rand index against the true groups", rows)


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


if __name__ == "__main__":
    indices()
