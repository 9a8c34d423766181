"""Values outside the documented domain are refused before anything is trained, in words that show no value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from torch import Tensor

from fedloom.deployment.charter import Charter, load_records
from fedloom.errors import DataError
from fedloom.experiment import Experiment
from fedloom.federation.building import federation_from_arrays
from fedloom.federation.records import Federation, Records, Silo
from support import federation_of, tiny_config

Refused = Callable[..., str]
IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(1))
HINT = "and pixels lie in [0, 1]; divide those from 0 to 255 by 255, or give them as uint8"
STRAYED = {
    "as if of 0 to 255": (IMAGES * 254.73, f"values above 1, {HINT}"),
    "below black": (IMAGES - 0.5173, f"values below 0, {HINT}"),
    "standardised": ((IMAGES - 0.5) * 3.4617, f"values below 0 and above 1, {HINT}"),
    "no number": (IMAGES.masked_fill(IMAGES > 0.9, torch.nan), "values that are not finite"),
    "infinite": (IMAGES.masked_fill(IMAGES > 0.9, torch.inf), "values that are not finite"),
}
IMAGE_CASES = pytest.mark.parametrize(("x", "words"), STRAYED.values(), ids=STRAYED)


def without_digits_of(x: Tensor, sentence: str) -> bool:
    """Whether neither extreme of the records stands in a sentence."""
    return all(f"{float(value):.5g}" not in sentence for value in (x.min(), x.max()))


def table(x: Tensor) -> Records:
    zeros = torch.zeros(len(x), dtype=torch.int64)
    return Records(x, zeros, zeros)


@IMAGE_CASES
def test_a_file_of_images_that_are_none_is_refused(x: Tensor, words: str, refused: Refused, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=x.numpy())
    settings = ("data.source=npz", "data.path=own.npz", "data.silos=1")
    sentence = refused("run", "demo", *settings, "--out", tmp_path / "run")
    assert re.sub(r"\s+", " ", f"x_train of own.npz holds {words}") in sentence
    assert without_digits_of(x, sentence)
    assert not (tmp_path / "run").exists()


@IMAGE_CASES
@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_federation_in_memory_is_refused_wherever_they_are(x: Tensor, words: str, part: str) -> None:
    good = table(IMAGES)
    tables = {name: table(x) if name == part else good for name in ("train", "validation", "test")}
    whose = "the held-out records hold" if part == "test" else "silo 'north' holds"
    with pytest.raises(DataError) as caught:
        Federation("tiny", (Silo("north", tables["train"], tables["validation"]),), tables["test"], ("all",))
    assert str(caught.value) == f"{whose} {words}"
    assert without_digits_of(x, str(caught.value))


@IMAGE_CASES
def test_a_silo_that_joins_is_told_by_its_own_worker(x: Tensor, words: str, tmp_path: Path) -> None:
    """It reads its records before it answers anybody; the charter says what a record is."""
    np.savez(tmp_path / "own.npz", x_train=x.numpy())
    charter = Charter(name="clinics", address="localhost:8443", silos={"one": "a"}, shape=(1, 8, 8))
    with pytest.raises(DataError, match=re.escape(words)):
        charter.at_a_silo("one", load_records(tmp_path / "own.npz"))


@pytest.mark.parametrize("x", [IMAGES, (IMAGES * 255).byte(), torch.zeros(20, 1, 8, 8), torch.ones(20, 1, 8, 8)])
def test_pixels_pass_to_the_very_bounds(x: Tensor) -> None:
    assert len(federation_from_arrays({"north": x})) == 1


def ages(scale: float, part: str = "train") -> Federation:
    (silo,) = federation_of([0] * 30).silos
    strayed = replace(silo.train, x=silo.train.x * scale)
    if part == "test":
        return Federation("ages", (silo,), strayed, ("a",))
    parts = {"train": silo.train, "validation": silo.train, part: strayed}
    return Federation("ages", (Silo("north", parts["train"], parts["validation"]),), silo.train, ("a",))


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("part", ["train", "validation", "test"])
@pytest.mark.parametrize(("scale", "words"), [(97.3, "values above 1"), (-0.873, "values below 0")])
def test_vectors_that_no_mean_of_the_likelihood_comes_near_are_refused(
    likelihood: str, part: str, scale: float, words: str, tmp_path: Path
) -> None:
    family = {"bernoulli": "Bernoulli", "gaussian": "Normal"}[likelihood]
    whose = "the held-out records hold" if part == "test" else "silo 'north' holds"
    with pytest.raises(DataError) as caught:
        Experiment.of(tiny_config(f"model.likelihood={likelihood}"), ages(scale, part))
    assert str(caught.value) == (
        f"{whose} {words}, and the likelihood {family} is for values in [0, 1]; scale each column to that first"
    )
    assert without_digits_of(ages(scale).silos[0].train.x, str(caught.value))


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.posterior=closed-form", "model.likelihood=gaussian", "model.hidden=[]", "method={name='fedvae'}"),
        ("method={name='moments'}",),
    ],
    ids=["linear", "moments"],
)
def test_vectors_of_any_size_pass_where_the_model_takes_them(overrides: tuple[str, ...]) -> None:
    federation = ages(97.3)
    labels = torch.arange(30) % 2
    (silo,) = federation.silos
    labelled = Silo("north", replace(silo.train, y=labels), replace(silo.train, y=labels))
    Experiment.of(tiny_config(*overrides), replace(federation, silos=(labelled,), classes=("x", "y")))


def test_a_networks_silo_of_its_own_is_asked_for_its_own_likelihood() -> None:
    """Of two silos the one whose records stray is named."""
    one, other = federation_of([0] * 10, [0] * 10).silos
    strayed = replace(other, train=replace(other.train, x=other.train.x + 1))
    with pytest.raises(DataError, match=r"^silo 'silo-1' holds values above 1"):
        Experiment.of(tiny_config(), Federation("two", (one, strayed), one.train, ("a",)))


def test_a_server_asks_no_silo_about_its_records() -> None:
    charter = Charter(name="clinics", address="localhost:8443", silos={"one": "a"}, shape=(6,))
    assert Experiment.of(tiny_config("method={name='fedvae'}"), charter.at_the_server()).federation.is_remote


def test_a_command_refuses_ages_in_a_file(refused: Refused, tmp_path: Path) -> None:
    np.savez(tmp_path / "ages.npz", x_train=np.random.default_rng(3).uniform(18, 97, (40, 3)))
    sentence = refused("run", "demo", "data.source=npz", "data.path=ages.npz", "data.silos=2", "--out", "run")
    assert "holds values above 1, and the likelihood Bernoulli is for values in [0, 1]" in sentence


def test_a_command_that_shows_data_refuses_them_too(fedloom: Callable[..., Result], tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=(IMAGES * 255).numpy())
    assert fedloom("data", "show", "npz", f"data.path={tmp_path / 'own.npz'}").exit_code == 2
