"""How networks see rows of a table, and how rows are drawn by what they put out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedloom.config import load_config
from fedloom.errors import ConfigError
from fedloom.evaluation.table_marginals import marginal_distance
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.modalities.base import modality_of
from fedloom.modalities.levels import Coding, Levels, drawn
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import modality_name
from fedloom.runs.checkpoint import load_checkpoint
from patient_rows import SCHEMA, rows

KIND = modality_name(SCHEMA)
EVERY = np.concatenate(
    [rows(500), np.array([[0, np.nan, np.nan, 0, 0], [100, 200, 2, 3, 1], [20, 50, 0, 0, 0], [19, 49.999, 1, 1, 1]])]
)
SMALL = (
    *("rounds=1", "model.likelihood=auto", "model.hidden=[16]", "model.latent=4", "local.batch_size=32"),
    *("local.epochs=1", "engine.workers=1", "engine.threads=1", "evaluation.metrics=[]", "evaluation.trackers=[]"),
)


def test_a_row_is_one_level_of_each_column() -> None:
    """The same levels and bins that are counted, edges, bounds and missing values among them."""
    expected = [
        functional.one_hot(torch.from_numpy(codes), size)
        for codes, size in zip(SCHEMA.codes(EVERY).T, SCHEMA.sizes, strict=True)
    ]
    found = modality_of(KIND, (5,)).decode(torch.from_numpy(EVERY))
    assert torch.equal(found, torch.cat(expected, dim=1).float())


def test_rows_of_several_silos_are_seen_alike() -> None:
    """As one program sees them: (silos, rows, columns)."""
    coding, x = Coding(SCHEMA), torch.from_numpy(EVERY[:20])
    assert torch.equal(coding.decode(x.reshape(4, 5, -1)), coding.decode(x).reshape(4, 5, -1))
    assert coding.seen((5,)) == (sum(SCHEMA.sizes),)


def test_the_likelihood_is_the_chance_of_all_levels() -> None:
    """Chances 1/4 and 3/4 of two levels, 1/2, 1/4, 1/4 of three: -log(3/4 * 1/2)."""
    output = torch.tensor([[0.0, math.log(3.0), math.log(2.0), 0.0, 0.0]])
    x = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0]])
    levels = Levels((2, 3))
    assert levels.negative_log(x, output).item() == pytest.approx(-math.log(3 / 8), rel=1e-6)
    torch.testing.assert_close(levels.mean(output), torch.tensor([[0.25, 0.75, 0.5, 0.25, 0.25]]))


def test_its_mean_moves_no_further_than_stated() -> None:
    """The largest singular value of the softmax's Jacobian is 1/2, at two levels of chance 1/2."""
    levels = Levels((2, 3))
    for output in (torch.zeros(5), torch.tensor([3.0, -1.0, 0.0, 2.0, 2.0])):
        jacobian = torch.func.jacrev(levels.mean)(output)
        assert torch.linalg.matrix_norm(jacobian, 2) <= levels.steepness + 1e-6
    assert torch.linalg.matrix_norm(torch.func.jacrev(levels.mean)(torch.zeros(5)), 2) == pytest.approx(0.5)


def test_draws_have_their_chances_and_say_nothing_of_where_in_a_bin_they_are() -> None:
    chances = torch.tensor([0.2, 0.0, 0.5, 0.3])
    level, inside = drawn(chances.expand(100_000, -1), torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(torch.bincount(level, minlength=4) / 100_000, chances, atol=0.01, rtol=0)
    assert int((level == 1).sum()) == 0
    for number in (0, 2, 3):
        part = inside[level == number]
        assert part.mean() == pytest.approx(0.5, abs=0.01)
        assert part.std() == pytest.approx(math.sqrt(1 / 12), abs=0.01)
    assert bool(((inside >= 0) & (inside < 1)).all())


def test_a_sample_is_a_row_as_networks_see_it() -> None:
    levels = Levels((2, 3))
    mean = torch.tensor([[0.25, 0.75, 1.0, 0.0, 0.0]]).expand(4000, -1)
    found = levels.sample(mean, torch.randn(mean.shape, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(found.mean(dim=0), mean[0], atol=0.03, rtol=0)
    assert torch.equal(found.sum(dim=1), torch.full((4000,), 2.0))


def test_rows_that_are_drawn_hold_values_of_their_levels_and_keep_to_rules() -> None:
    ruled = Schema.of(
        {
            "rules": ["first <= last"],
            "columns": {
                "first": {"kind": "integer", "bounds": [0, 9], "bins": 5},
                "last": {"kind": "integer", "bounds": [0, 9], "bins": 5},
            },
        }
    )
    for schema in (SCHEMA, ruled):
        coding = Coding(schema)
        chances = torch.cat([torch.full((500, size), 1 / size) for size in schema.sizes], dim=1)
        noise = torch.randn(500, *coding.noise, generator=torch.Generator().manual_seed(0))
        made = coding.draw(chances, noise)
        assert made.dtype == torch.float64
        assert torch.equal(coding.decode(made).sum(dim=1), torch.full((500,), float(len(schema.sizes))))
        assert coding.decode(made).mean(dim=0).min() > 0  # every level and every null turns up
    assert bool((made[:, 0] <= made[:, 1]).all())


PLAIN = ("method={}", "privacy={}", *SMALL)
MECHANISMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "dp-sgd": ("privacy.mechanism=dp-sgd", "privacy.epsilon=5.0", "privacy.noise=test"),
}


def federation() -> Federation:
    """Two silos of the young and two of the old."""
    table = rows(400)
    young = table[:, 0] < 50
    parts = [(np.flatnonzero(young == (group == 0))[half::2], group) for group in (0, 1) for half in (0, 1)]
    silos = []
    for number, (index, group) in enumerate(parts):
        x = torch.from_numpy(table[index])
        records = Records(x, torch.full((len(x),), -1), torch.full((len(x),), group), kind=KIND)
        silos.append(Silo(f"silo-{number}", records))
    return Federation("patients", tuple(silos), silos[0].train, ("young", "old"))


METHODS = {
    "fedvae": ("method.name=fedvae",),
    "fissionvae": ("method.name=fissionvae",),
    "align_fl": ("method.name=align_fl", "server.samples=100", "server.epochs=1"),
    "flow_vae": ("method.name=flow_vae",),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_of_networks_learn_tables_in_both_engines(method: str, mechanism: str, tmp_path: Path) -> None:
    config = load_config("tables/demo", [*PLAIN, *METHODS[method], *MECHANISMS[mechanism]])
    made = []
    for engine in ("reference", "fused"):
        chosen = replace(config, engine=replace(config.engine, name=engine))
        train(chosen, tmp_path / engine, federation())
        made.append(load_checkpoint(tmp_path / engine).server)
    assert made[0].keys() == made[1].keys()
    for name, tensor in made[0].items():
        torch.testing.assert_close(made[1][name], tensor, atol=2e-4, rtol=2e-3)


def test_what_is_learned_is_nearer_to_its_group_than_the_other_group_is(tmp_path: Path) -> None:
    """Decoders of the young and the old, which share an encoder: FissionVAE+D."""
    learning = ("rounds=8", "local.epochs=4", "local.learning_rate=5e-3")
    config = load_config("tables/demo", [*PLAIN, "method.name=fissionvae", *learning])
    run, silos = train(config, tmp_path / "run", federation()), federation().silos
    young, old = (np.concatenate([silo.train.x.numpy() for silo in silos[start : start + 2]]) for start in (0, 2))
    between = marginal_distance(SCHEMA, young, old, 2)
    for group, own in (("young", young), ("old", old)):
        made = run.sample(1000, group=group).numpy()
        assert marginal_distance(SCHEMA, made, own, 2) < between / 2


def test_rows_are_always_drawn() -> None:
    settings = [*PLAIN, *METHODS["align_fl"], "server.targets=samples"]
    with pytest.raises(ConfigError, match=r"server\.targets = 'samples' is not for rows of 5 columns"):
        Experiment.of(load_config("tables/demo", settings), federation())
