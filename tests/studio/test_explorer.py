"""From places in the latent space to images."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.experiment import load
from fedloom.methods.base import Pathway, SampleInputs
from fedloom.methods.generator import Generator
from fedloom.models.vae import VAE
from fedloom.studio.explorer import ATLAS, Explorer, View


@pytest.fixture(scope="module")
def explorer(trained: Path) -> Explorer:
    """Four latent dimensions, priors -1 and +1."""
    return Explorer(load(trained / "four").generator(), 2)


@pytest.fixture(scope="module")
def view(explorer: Explorer) -> View:
    return explorer.settled(View())


def decoded(explorer: Explorer, group: str, z: Tensor) -> Tensor:
    """What a group's decoder makes of z1 itself."""
    model = explorer.generator.model(group)
    assert isinstance(model, VAE)
    number = torch.tensor([explorer.generator.groups.index(group)])
    return model.likelihood.mean(model.decode(z.unsqueeze(0), number)).detach()


def test_a_view_has_defaults(explorer: Explorer, view: View) -> None:
    assert view == View("mnist", "mnist", "z1", "")
    assert explorer.settled(View(group="fashion-mnist")) == View("fashion-mnist", "fashion-mnist", "z1", "")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (View(group="mnits"), "unknown group 'mnits'; did you mean 'mnist'?"),
        (View(prior="x"), "unknown prior 'x'"),
        (View(pathway="z2"), "unknown pathway 'z2'"),
    ],
)
def test_a_view_of_what_is_not_there(explorer: Explorer, wrong: View, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        explorer.settled(wrong)


@pytest.mark.parametrize(("prior", "mean"), [("mnist", -1.0), ("fashion-mnist", 1.0)])
def test_a_place_is_counted_from_the_mean_of_the_chosen_prior(explorer: Explorer, prior: str, mean: float) -> None:
    view = explorer.settled(View("mnist", prior))
    place = torch.tensor([0.5, -0.25, 1.0, 0.0])
    torch.testing.assert_close(explorer.images(view, place.unsqueeze(0)), decoded(explorer, "mnist", place + mean))


def test_main_directions_are_at_right_angles_and_the_first_changes_most(explorer: Explorer, view: View) -> None:
    found = explorer.directions(view)
    torch.testing.assert_close(found.axes.T @ found.axes, torch.eye(4), atol=1e-5, rtol=0)
    assert list(found.shares) == sorted(found.shares, reverse=True)
    assert math.isclose(sum(found.shares), 1.0, rel_tol=1e-6)


def test_main_directions_of_a_linear_map_are_its_singular_vectors() -> None:
    """x = A z with A' A = U diag(9, 4, 1) U': the directions are U's columns, the shares 9/14, 4/14, 1/14."""
    generator = torch.Generator().manual_seed(3)
    u = torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]
    a = torch.linalg.qr(torch.randn(16, 3, generator=generator))[0] @ torch.diag(torch.tensor([3.0, 2.0, 1.0])) @ u.T

    def generate(_: nn.Module, inputs: SampleInputs) -> Tensor:
        return (inputs.noise["z"] @ a.T).reshape(-1, 1, 4, 4)

    found = Explorer(one_pathway(Pathway({"z": (3,)}, generate, "", ())), 1)
    directions = found.directions(found.settled(View()))
    np.testing.assert_allclose(directions.shares, [9 / 14, 4 / 14, 1 / 14], rtol=1e-4)
    np.testing.assert_allclose((directions.axes.T @ u).abs().numpy(), np.eye(3), atol=1e-3)


def one_pathway(way: Pathway, classes: tuple[str, ...] = ()) -> Generator:
    """A generator without weights that has one way to generate."""
    from fedloom.methods.base import Method
    from fedloom.methods.steps import Merged, ServerState
    from fedloom.sharing.plan import SharingPlan

    plan = SharingPlan({}, ("all",))
    method = Method("made-up", plan, lambda _: nn.Identity(), (), Merged(), {"way": way})
    return Generator(method, ServerState({}), ("all",), classes)


def test_noise_on_the_way_stays_at_its_mean_and_a_class_is_told() -> None:
    def generate(_: nn.Module, inputs: SampleInputs) -> Tensor:
        assert not inputs.noise["more"].any()
        return (inputs.noise["z"].sum(dim=1) + inputs.condition).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)

    way = Pathway({"z": (2,), "more": (5,)}, generate, "", (), labelled=True)
    found = Explorer(one_pathway(way, ("cat", "dog")), 1)
    for label, number in (("cat", 0), ("dog", 1)):
        assert found.images(found.settled(View(label=label)), torch.tensor([[0.25, 0.5]]))[0, 0, 0, 0] == 0.75 + number
    assert found.settled(View()).label == "cat"
    with pytest.raises(ConfigError, match="unknown class 'bird'"):
        found.settled(View(label="bird"))


@pytest.mark.parametrize("shape", [(7,), (2, 4, 4)])
def test_what_is_no_image_is_not_explored(shape: tuple[int, ...]) -> None:
    way = Pathway({"z": (2,)}, lambda _, inputs: torch.zeros(len(inputs.noise["z"]), *shape), "", ())
    with pytest.raises(ConfigError, match="have no pictures, so there is nothing to look at"):
        Explorer(one_pathway(way), 1)


def test_a_method_that_generates_nothing_is_not_explored(explorer: Explorer) -> None:
    method = replace(explorer.generator.method, pathways={})
    with pytest.raises(ConfigError, match="has no generator at the server to explore"):
        Explorer(replace(explorer.generator, method=method), 1)


def test_a_draw_is_where_its_coordinates_say(explorer: Explorer, view: View) -> None:
    assert not explorer.drawn(view, 0).any()
    assert explorer.coordinates(view, 0) == [0, 0, 0, 0]
    place = explorer.place(view, 3, explorer.coordinates(view, 3))
    torch.testing.assert_close(place, explorer.drawn(view, 3), atol=2e-3, rtol=0)  # three decimals
    assert not torch.equal(explorer.drawn(view, 3), explorer.drawn(view, 4))


def test_values_move_along_directions_and_leave_the_rest() -> None:
    """With more dimensions than directions, what lies across them stays that of the draw."""
    way = Pathway({"z": (20,)}, lambda _, inputs: inputs.noise["z"].reshape(-1, 1, 4, 5), "", ())
    explorer = Explorer(one_pathway(way), 1)
    view = explorer.settled(View())
    axes = explorer.directions(view).axes
    assert axes.shape == (20, 8)
    values = [1.0, -2.0, 0.5, 0.0, 0.0, 3.0, 0.0, 0.25]
    place, start = explorer.place(view, 5, values), explorer.drawn(view, 5)
    torch.testing.assert_close(axes.T @ place, torch.tensor(values), atol=1e-4, rtol=0)
    torch.testing.assert_close(place - axes @ (axes.T @ place), start - axes @ (axes.T @ start), atol=1e-4, rtol=0)


def test_the_atlas_runs_from_the_top_left(explorer: Explorer, view: View) -> None:
    values = [0.5, -0.5, 1.0, -1.0]
    images = explorer.atlas(view, 0, values)
    assert images.shape == (ATLAS**2, 1, 28, 28)
    for row, column, x, y in ((0, 0, -3, 3), (0, 10, 3, 3), (10, 0, -3, -3), (5, 5, 0, 0), (4, 6, 0.6, 0.6)):
        here = explorer.images(view, explorer.place(view, 0, [x, y, 1.0, -1.0]).unsqueeze(0))[0]
        torch.testing.assert_close(images[row * ATLAS + column], here)


def test_between_two_images_lie_both_and_the_arc(explorer: Explorer, view: View) -> None:
    first, middle, last = explorer.between(view, (1, 2), torch.tensor([0.0, 0.5, 1.0]))
    ends = [explorer.drawn(view, draw) for draw in (1, 2)]
    for image, place in ((first, ends[0]), (middle, (ends[0] + ends[1]) / math.sqrt(2)), (last, ends[1])):
        torch.testing.assert_close(image, explorer.images(view, place.unsqueeze(0))[0])


def picture(client: TestClient, address: str) -> Image.Image:
    answer = client.get(address)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png"), answer.text
    return Image.open(io.BytesIO(answer.content))


def test_frames_are_what_the_explorer_makes(client: TestClient, keys: dict[str, str], explorer: Explorer) -> None:
    base, view = f"/runs/{keys['four']}/2", explorer.settled(View("fashion-mnist", "mnist"))
    found = picture(client, f"{base}/frame?group=fashion-mnist&prior=mnist&values=1,0,-1,0.5&draw=2")
    image = explorer.images(view, explorer.place(view, 2, [1, 0, -1, 0.5]).unsqueeze(0))[0, 0]
    assert np.array_equal(np.asarray(found), (image * 255).round().byte().numpy())
    assert picture(client, f"{base}/atlas?values=0,0,0,0").size == (ATLAS * 28, ATLAS * 28)
    assert picture(client, f"{base}/strip?first=1&last=2").size == (9 * 28, 28)
    same = [picture(client, f"{base}/{name}").tobytes() for name in ("sample?draw=4", "between?first=1&last=4&share=1")]
    assert same[0] == same[1]
    start = client.get(f"{base}/start?draw=4").json()
    assert (len(start["values"]), len(start["shares"]), start["size"]) == (4, 4, 4)


def test_two_dimensions_are_walked_as_they_are(client: TestClient, keys: dict[str, str]) -> None:
    start = client.get(f"/runs/{keys['sweep/two']}/2/start").json()
    assert start == {"values": [0, 0], "shares": [], "size": 2}


@pytest.mark.parametrize(
    ("address", "status", "sentence"),
    [
        ("2/frame?values=1", 400, "values must be 4 numbers from -6 to 6"),
        ("2/frame?values=1,2,3,7", 400, "values must be 4 numbers from -6 to 6"),
        ("2/frame?values=1,2,3,nan", 400, "values must be 4 numbers from -6 to 6"),
        ("2/frame?values=a", 400, "values = 'a' must be numbers with commas between them"),
        ("2/frame?values=" + "1," * 101, 400, "values: String should have at most 200 characters"),
        ("2/sample?draw=10000", 400, "draw = 10000 must be from 0 to 9999"),
        ("2/sample?draw=-1", 400, "draw = -1 must be from 0 to 9999"),
        ("2/sample?draw=x", 400, "draw: Input should be a valid integer, unable to parse string as an integer"),
        ("2/between?first=1&last=2&share=2", 400, "share: Input should be less than or equal to 1"),
        ("2/sample?draw=1&group=x", 400, "unknown group 'x' (allowed: fashion-mnist, mnist)"),
        ("2/sample?draw=1&group=" + "x" * 201, 400, "group: String should have at most 200 characters"),
        *(
            (f"{number}/sample?draw=1", 404, f"run 'four' has no checkpoint of round {number}")
            for number in ("9", "0", "-1", "9" * 300)
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    client: TestClient, keys: dict[str, str], address: str, status: int, sentence: str
) -> None:
    answer = client.get(f"/runs/{keys['four']}/{address}")
    assert answer.status_code == status
    assert answer.text.endswith(sentence)
