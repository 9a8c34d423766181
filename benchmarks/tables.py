"""Synthetic tables of Adult at a true epsilon: ours, peers', and what it costs that the rows lie at many silos.

    python benchmarks/tables.py adult.csv --set curve silos alone
    python benchmarks/tables.py adult.csv --set peers --peer-python .venv-peers/bin/python

``adult.csv`` holds the 32,561 rows of the census with their header; papers/tables says where it is. Four fifths are
trained on and a fifth is held out. The 13 columns, their levels and their bins are those of the package's own schema,
which leaves out ``fnlwgt`` and ``education-num``: a weight of the survey, and another name of ``education``. Everybody
gets the same codes, and nobody spends budget on bins. One record is added or removed, delta is 1e-5. Peers (``dpmm``,
from PyPI) have an environment of their own. Rows that are in the results already are not run again.

- pair distance: total variation of all pairs of columns, on average, of as many synthetic rows as training rows;
- AUC: gradient boosting learns the income from synthetic rows and is tested on real rows that were held out;
- seconds: of counting and fitting, by the clock and of one processor, on the machine and under the load that it had.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common import RESULTS, keep, show
from fedloom.config import Config
from fedloom.evaluation.table_marginals import marginal_distance
from fedloom.evaluation.table_utility import learned
from fedloom.experiment import train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.sample import FOLDER
from fedloom.federation.tables import SiloTable, examples_of, read_csv
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import modality_name
from fedloom.privacy.accounting import Budget
from fedloom.privacy.silo_privacy import whole_noise
from fedloom.settings import override, parse, read_toml
from fedloom.streams import Streams

NAME = "tables-cpu"
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
DELTA = 1e-5
LEFT_OUT = ("fnlwgt", "education-num")
SKEW = 0.3  # of a Dirichlet distribution: how unevenly each education is spread over silos
SETTINGS = (
    *("rounds=1", "method.name=marginals", "sharing.weights=equal", "evaluation.metrics=[]"),
    *("privacy.mechanism=dp-sgd", f"privacy.delta={DELTA}", "privacy.noise=test"),  # a seed gives the same figures
    *("engine.name=reference", "engine.workers=1", "engine.threads=1"),
)
Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Adult:
    """The table, divided once and for all."""

    schema: Schema
    train: Records
    test: Records

    @classmethod
    def read(cls, path: Path) -> Adult:
        """The rows of the file."""
        schema = replace(Schema.of(read_toml(FOLDER / "adult-schema.toml")), ignored=LEFT_OUT)
        x = examples_of(schema, [SiloTable("", read_csv(path))], several=False).x
        order, kept = Streams(0).permutation("benchmark/tables", len(x)), len(x) * 4 // 5
        nobody = torch.zeros(len(x), dtype=torch.int64)
        records = Records(x, nobody - 1, nobody, kind=modality_name(schema))
        return cls(schema, records.take(order[:kept]), records.take(order[kept:]))

    def federation(self, owners: NDArray[np.int64]) -> Federation:
        """The training rows at their owners."""
        tables = [self.train.take(torch.from_numpy(np.flatnonzero(owners == o))) for o in np.unique(owners)]
        silos = tuple(Silo(f"silo-{number}", table) for number, table in enumerate(tables))
        return Federation("adult", silos, replace(self.test, kind=self.train.kind), ("adult",))

    def finely(self) -> Adult:
        """The same rows with bins of a year, an hour and 100 dollars, in place of those that somebody chose well."""
        dollars = [0, 1, *range(100, 5_000, 100)]
        edges = {
            "age": range(17, 91),
            "hours-per-week": range(1, 100),
            "capital-gain": [*dollars, *range(5_000, 100_000, 1_000)],
            "capital-loss": dollars,
        }
        tree = read_toml(FOLDER / "adult-schema.toml")
        for name, places in edges.items():
            tree["columns"][name] = {"kind": "integer", "edges": list(places)}
        schema = replace(Schema.of(tree), ignored=LEFT_OUT)
        return replace(self, train=replace(self.train, kind=modality_name(schema)))

    def owners(self, silos: int, skewed: bool) -> NDArray[np.int64]:
        """Whose each row is: anybody's, or by its education."""
        draw = np.random.default_rng(0)
        if not skewed:
            return draw.permutation(len(self.train)) % silos
        level = self.schema.codes(self.train.x.numpy())[:, self.schema.names.index("education")]
        shares = draw.dirichlet(np.full(silos, SKEW), int(level.max()) + 1)
        found: NDArray[np.int64] = np.array([draw.choice(silos, p=shares[each]) for each in level])
        return found

    def figures(self, synthetic: Rows) -> dict[str, float]:
        """What synthetic rows are worth."""
        rows, real, held_out = synthetic, self.train.x.numpy(), self.test.x.numpy()
        return {
            "pair distance": marginal_distance(self.schema, rows, real, 2),
            "to held-out": marginal_distance(self.schema, rows, held_out, 2),
            "AUC": learned(self.schema, rows, held_out).auc,
        }


@dataclass(frozen=True)
class Trial:
    """One row of the results."""

    what: str
    epsilon: float
    seed: int
    work: Callable[[float, int], tuple[Rows, float, float]]  # synthetic rows, seconds by the clock and of a processor


def ours(federation: Federation, *settings: str) -> Callable[[float, int], tuple[Rows, float, float]]:
    """The method as anybody runs it."""

    def work(epsilon: float, seed: int) -> tuple[Rows, float, float]:
        config = parse(Config, override({}, [*SETTINGS, f"privacy.epsilon={epsilon}", f"seed={seed}", *settings]))
        with tempfile.TemporaryDirectory() as folder:
            wall, processor = time.perf_counter(), time.process_time()
            run = train(config, Path(folder) / "run", federation)
            seconds = time.perf_counter() - wall, time.process_time() - processor
            made = run.generator()
            count = sum(len(silo) for silo in federation.silos)
            return made.sample(count, group="adult", seed=seed).numpy(), *seconds

    return work


def union(federation: Federation) -> Callable[[float, int], tuple[Rows, float, float]]:
    """Each silo alone at the whole epsilon, and their synthetic rows put together."""

    def work(epsilon: float, seed: int) -> tuple[Rows, float, float]:
        parts = [ours(replace(federation, silos=(silo,)))(epsilon, seed) for silo in federation.silos]
        rows, wall, processor = zip(*parts, strict=True)
        return np.concatenate(rows), sum(wall), sum(processor)

    return work


def peer(adult: Adult, python: str, name: str, limit: float) -> Callable[[float, int], tuple[Rows, float, float]]:
    """A generator of another project, in its own environment."""

    def work(epsilon: float, seed: int) -> tuple[Rows, float, float]:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "codes.npz", Path(folder) / "made.npz"
            np.savez(source, codes=adult.schema.codes(adult.train.x.numpy()), sizes=np.array(adult.schema.sizes))
            script = Path(__file__).parent / "tables_peer.py"
            arguments = [source, out, name, epsilon, DELTA, seed]
            subprocess.run([python, script, *map(str, arguments)], check=True, timeout=limit, capture_output=True)
            with np.load(out) as made:
                inside = np.random.default_rng(seed).random(made["codes"].shape)
                return adult.schema.values(made["codes"], inside), *made["seconds"].tolist()

    return work


def bounds(adult: Adult) -> list[Trial]:
    """What no generator passes: rows drawn from the training rows, and the training rows."""
    real = adult.train.x.numpy()

    def drawn(_: float, seed: int) -> tuple[Rows, float, float]:
        return real[np.random.default_rng(seed).integers(0, len(real), len(real))], 0.0, 0.0

    return [Trial("bootstrap", 0.0, 0, drawn), Trial("training rows", 0.0, 0, lambda *_: (real, 0.0, 0.0))]


def trials(adult: Adult, options: argparse.Namespace) -> list[Trial]:
    """All that is asked for, in the order in which it is run."""
    seeds, found = range(options.seeds), bounds(adult)
    central = ours(adult.federation(adult.owners(1, skewed=False)))
    if "curve" in options.set:
        found += [Trial("central", epsilon, seed, central) for seed in seeds for epsilon in options.epsilons]
    if "peers" in options.set:
        run = peer(adult, options.peer_python, options.peer, options.limit)
        found += [Trial(options.peer, epsilon, seed, run) for seed in seeds for epsilon in options.epsilons]
    if "merged" in options.set:
        for what, rows in (("well-chosen bins", adult), ("fine bins", adult.finely())):
            for levels in (0, 16):
                settings = ("rounds=2", f"method.levels={levels}") if levels else ()
                run = ours(rows.federation(rows.owners(1, skewed=False)), *settings)
                name = f"{what}, merged to {levels}" if levels else what
                found += [Trial(name, 1.0, seed, run) for seed in seeds if levels or rows is not adult]
    for silos in (10, 100):
        federations = {kind: adult.federation(adult.owners(silos, kind == "skewed")) for kind in ("IID", "skewed")}
        if "silos" in options.set:
            # Each of M silos trusts the noise of the M - 1 others, so together they add a little more than one would.
            more = whole_noise(Budget(1.0, DELTA)) * math.sqrt(silos / (silos - 1))
            run = ours(adult.federation(adult.owners(1, skewed=False)), f"privacy.noise_multiplier={more}")
            found += [Trial(f"central, the noise of {silos} that share", 1.0, seed, run) for seed in seeds]
            for kind, federation in federations.items():
                for trust, settings in (("shared", ("privacy.trust=distributed",)), ("own", ())):
                    run = ours(federation, *settings)
                    found += [Trial(f"{silos} {kind}, {trust} noise", 1.0, seed, run) for seed in seeds]
        if "alone" in options.set and silos == 10:  # a hundred fits say the same, and take ten times as long
            for kind, federation in federations.items():
                alone = ours(replace(federation, silos=federation.silos[:1]))
                found += [Trial(f"one of {silos} {kind}", 1.0, seed, alone) for seed in seeds]
                found += [Trial(f"union of {silos} {kind}", 1.0, seed, union(federation)) for seed in seeds]
    return found


def stored() -> list[dict[str, Any]]:
    """The rows that are there already."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    found = []
    for what, epsilon in dict.fromkeys((row["what"], row["epsilon"]) for row in rows):
        same = [row for row in rows if (row["what"], row["epsilon"]) == (what, epsilon)]
        means = {key: float(np.mean([row[key] for row in same])) for key in list(same[0])[3:]}
        found.append({"what": what, "epsilon": epsilon, "seeds": len(same), **means})
    return found


def main() -> None:
    """Run what is missing, one after the other, and keep each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="adult.csv")
    parser.add_argument("--set", nargs="+", choices=("curve", "silos", "alone", "peers", "merged"), default=["curve"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--peer", choices=("mst", "aim"), default="mst")
    parser.add_argument("--peer-python", default="python", help="of an environment with dpmm")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a peer may take")
    options = parser.parse_args()
    adult, rows = Adult.read(options.path), stored()
    for trial in trials(adult, options):
        facts = {"what": trial.what, "epsilon": trial.epsilon, "seed": trial.seed}
        if any(facts.items() <= row.items() for row in rows):
            continue
        try:
            made, wall, processor = trial.work(trial.epsilon, trial.seed)
        except subprocess.TimeoutExpired:
            print(f"{trial.what} at epsilon {trial.epsilon}: not done after {options.limit:.0f} s", flush=True)
            break
        rows.append({**facts, **adult.figures(made), "seconds": wall, "processor": processor})
        show("", rows[-1:])
        keep(NAME, rows)
    show("means over seeds", summary(rows))


if __name__ == "__main__":
    main()
