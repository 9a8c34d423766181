from __future__ import annotations

import math
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, vmap

from fedloom.errors import ConfigError
from fedloom.models.convolutional import Upwards
from fedloom.models.networks import Flat
from fedloom.privacy.lipschitz import (
    Bounded,
    align_bound,
    bound_spectrally,
    bounded_decoder,
    certified_constant,
    gram_norm,
    latent_radius,
    overlap,
    sampled_constant,
)

CONVOLUTIONS = {
    "conv": (lambda: nn.Conv2d(2, 3, 4, 2, 1), (2, 8, 8)),
    "stride 1": (lambda: nn.Conv2d(2, 3, 3, 1, 1), (2, 6, 6)),
    "stride above kernel": (lambda: nn.Conv2d(2, 3, 2, 3), (2, 7, 7)),
    "dilated": (lambda: nn.Conv2d(2, 3, 3, 2, 2, dilation=2), (2, 9, 9)),
    "uneven": (lambda: nn.Conv2d(1, 2, (1, 5), (1, 2)), (1, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 4, 2, 1), (3, 4, 4)),
    "transposed, odd": (lambda: nn.ConvTranspose2d(3, 2, 4, 2, 2, 1), (3, 4, 4)),
}


def stretch(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """The largest singular value of the whole linear map."""
    zeros = torch.zeros(math.prod(shape), dtype=torch.float64)
    jacobian = jacfwd(lambda x: layer(x.reshape(1, *shape)).flatten())(zeros)
    return float(torch.linalg.matrix_norm(jacobian.detach(), 2))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_never_stretch_more_than_certified(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer = make().double()
    true, bound = stretch(layer, shape), certified_constant(layer)
    assert true <= bound <= 2.2 * true
    nn.init.constant_(layer.weight, 0.1)  # aligned kernels come close to the bound
    assert stretch(layer, shape) <= certified_constant(layer)


def test_the_bound_of_a_constant_kernel_is_nearly_reached_on_a_large_image() -> None:
    """A 3x3 kernel of ones sums nine pixels: on a constant image every value grows ninefold, and the bound is 9."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    assert certified_constant(layer) == pytest.approx(9)
    image = torch.ones(1, 1, 400, 400)
    assert float(layer(image).detach().norm() / image.norm()) > 8.9


def test_overlap_counts_the_patches_over_a_pixel() -> None:
    assert overlap(nn.Conv2d(1, 1, 4, 2)) == 4
    assert overlap(nn.Conv2d(1, 1, 3, 1)) == 9
    assert overlap(nn.Conv2d(1, 1, (5, 1), (2, 1))) == 3
    assert overlap(nn.Conv2d(1, 1, 3, 2, dilation=2)) == 9  # the stride never separates the taps
    assert overlap(nn.Conv2d(1, 1, 3, 2, dilation=3)) == 4


def test_the_constant_of_a_network_is_the_product_over_its_layers() -> None:
    """Diagonal weights 3 and 2, a slope of 2 at most, a quarter for the sigmoid: 3 * 2 * 2 / 4 = 3."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        second.weight.copy_(torch.diag(torch.tensor([2.0, 0.5])))
    network = nn.Sequential(first, nn.LeakyReLU(-2.0), second, nn.Sigmoid())
    assert certified_constant(network) == pytest.approx(3)


@pytest.mark.parametrize(
    "make",
    [lambda: Flat((3,), (8, 8), (1, 5, 6)), lambda: Upwards(3, (4, 6), (1, 7, 9))],
    ids=["mlp", "conv"],
)
def test_no_decoder_of_the_house_is_steeper_than_its_certificate(make) -> None:
    torch.manual_seed(1)
    decoder = nn.Sequential(make(), nn.Sigmoid())
    certified, sampled = certified_constant(decoder), sampled_constant(decoder, 5 * torch.randn(200, 3))
    assert 0 < sampled <= certified
    a, b = torch.randn(50, 3), torch.randn(50, 3)
    ratios = (decoder(a) - decoder(b)).flatten(1).norm(dim=1) / (a - b).norm(dim=1)
    assert float(ratios.detach().max()) <= certified


def test_the_sampled_constant_is_exact_at_its_points() -> None:
    """f(z) = (z1^2, 3 z2) has the Jacobian diag(2 z1, 3)."""

    def function(z: Tensor) -> Tensor:
        return torch.stack((z[:, 0] ** 2, 3 * z[:, 1]), dim=1)

    assert sampled_constant(function, torch.tensor([[1.0, 0.0]])) == pytest.approx(3)
    assert sampled_constant(function, torch.tensor([[1.0, 0.0], [5.0, 1.0]]), chunk=1) == pytest.approx(10)


@pytest.mark.parametrize("shape", [(5, 5), (30, 7), (7, 30)])
def test_gram_iteration_is_a_tight_upper_bound(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= float(gram_norm(matrix)) <= exact * min(shape) ** (1 / 128) * 1.0001
    assert float(gram_norm(matrix * 1e12)) == pytest.approx(float(gram_norm(matrix)) * 1e12, rel=1e-3)
    assert float(gram_norm(torch.zeros(3, 3))) < 0.1


@pytest.mark.parametrize("shape", [(5, 5), (30, 7), (7, 30)])
def test_the_gradient_of_the_bound_is_that_of_the_norm(shape: tuple[int, int]) -> None:
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), False)
    matrix = (left * torch.tensor([2.0, *[0.5] * (min(shape) - 1)]) @ right).requires_grad_()
    (found,) = torch.autograd.grad(gram_norm(matrix), matrix)
    (truth,) = torch.autograd.grad(torch.linalg.matrix_norm(matrix, 2), matrix)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)
    (nothing,) = torch.autograd.grad(gram_norm(zeros := torch.zeros(shape, requires_grad=True)), zeros)
    assert not nothing.any()


@pytest.mark.parametrize(
    "make", [lambda: Flat((3,), (8, 8), (20,)), lambda: Upwards(3, (4, 6), (1, 8, 8))], ids=["mlp", "conv"]
)
def test_bounded_decoders_stay_bounded_through_training(make) -> None:
    torch.manual_seed(0)
    decoder = bound_spectrally(make(), limit=1.5)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=10.0)
    target = 100 * torch.randn_like(decoder(torch.zeros(16, 3)))
    for _ in range(5):
        optimizer.zero_grad()
        (decoder(torch.randn(16, 3)) - target).square().mean().backward()
        optimizer.step()
    layers = sum(isinstance(m, Bounded) for m in decoder.modules())
    assert certified_constant(decoder) <= 1.5**layers
    assert sampled_constant(decoder, torch.randn(50, 3)) <= 1.5**layers


def test_a_bound_leaves_flat_layers_alone() -> None:
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    torch.testing.assert_close(Bounded(layer, limit=2.0).bounded(), torch.eye(4))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_bounded_layer_is_the_layer_with_a_shorter_weight(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer = make()
    x = torch.randn(2, *shape)
    bounded = Bounded(layer, limit=0.5)
    assert bounded.weight is layer.weight
    with torch.no_grad():
        layer.weight.copy_(bounded.bounded())
    torch.testing.assert_close(Bounded(layer, limit=1e9)(x), layer(x))
    assert stretch(layer.double(), shape) <= 0.5


@pytest.mark.parametrize("constant", [0.1, 5.0])
@pytest.mark.parametrize(
    "make", [lambda: Flat((3,), (8, 8), (20,)), lambda: Upwards(3, (4, 6), (1, 8, 8))], ids=["mlp", "conv"]
)
def test_a_bounded_decoder_has_the_constant_that_was_asked_for(make, constant: float) -> None:
    """Weights a hundred times too large: every layer is at its limit, so the certificate is close to the constant."""
    torch.manual_seed(0)
    decoder = make()
    names = set(decoder.state_dict())
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(100)
    bounded = bounded_decoder(decoder, constant)
    assert set(bounded.state_dict()) == names, "a checkpoint does not tell them apart"
    image = nn.Sequential(bounded, nn.Sigmoid())
    assert 0.8 * constant < certified_constant(image) <= constant
    assert sampled_constant(image, torch.randn(50, 3)) <= constant


def test_bounded_layers_can_be_stacked_and_do_not_notice_autocast() -> None:
    torch.manual_seed(0)
    decoder = bounded_decoder(Flat((3,), (8,), (5,)), 0.1)
    weights = {name: torch.stack([p.detach(), 50 * p.detach()]) for name, p in decoder.named_parameters()}
    z = torch.randn(2, 4, 3)
    together = vmap(lambda w, x: functional_call(decoder, w, (x,)))(weights, z)
    for number in range(2):
        alone = functional_call(decoder, {name: w[number] for name, w in weights.items()}, (z[number],))
        torch.testing.assert_close(together[number], alone)
    layer = Bounded(nn.Linear(30, 30), 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.bounded()
    assert torch.equal(inside, layer.bounded())


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2)), "known for GroupNorm"),
        (nn.Conv2d(2, 2, 1, groups=2), "convolutions with groups"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "other padding than zeros"),
        (Odd(), "no Lipschitz constant is known for '.*exp"),
    ],
)
def test_networks_without_a_certificate_are_refused_by_name(network: nn.Module, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        certified_constant(network)


def test_the_papers_bound_is_vacuous_at_the_papers_settings() -> None:
    """L = 1, 784 pixels in [0, 1], two latents, ten rounds of 25,000 points: alpha = 269, epsilon = 8.2 million."""
    radius = latent_radius(2, 1e-5)
    assert radius == pytest.approx(math.sqrt(-2 * math.log(1e-5)))
    bound = align_bound(1.0, 28.0, radius, rounds=10, released=25_000)
    assert bound.alpha == pytest.approx(268.7, rel=1e-3)
    assert bound.epsilon == pytest.approx(8.2e6, rel=2e-3)
    assert bound.vacuous
    assert "vacuous, since alpha = 269 is at least 1/4" in bound.sentence


def test_a_tiny_constant_escapes_vacuity_but_not_the_doubts() -> None:
    """Epsilon 10 needs L of about 1.5e-12."""
    bound = align_bound(1.5e-12, 28.0, 4.8, rounds=10, released=25_000)
    assert bound.epsilon == pytest.approx(10, rel=0.01)
    assert not bound.vacuous
    assert bound.sentence.startswith("no DP guarantee")
    curve = [align_bound(1.5e-12, r, 4.8, rounds=10, released=25_000).epsilon for r in (0, 1, 4)]
    assert curve == pytest.approx([0, curve[1], 2 * curve[1]])
    with pytest.raises(ConfigError, match="data_radius is -1"):
        align_bound(1.0, -1, 1.0, 1, 1)


def test_the_figure_of_the_bound_is_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "papers" / "align-fl" / "figure6.py"
    runpy.run_path(str(script))["main"](tmp_path / "figure6.svg")
    lines = ElementTree.parse(tmp_path / "figure6.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 8, "a solid and a dashed part for each of four constants"
    solid = [len((line.get("points") or "").split()) for line in lines[::2]]
    assert solid[0] == 71, "with L = 1e-12 the bound is never vacuous"
    assert solid[3] == 9, "with L = 1 it is beyond a radius of 1 / (8 R_z) = 0.026"
    told = capsys.readouterr().out
    assert "no DP guarantee: the bound (epsilon 8.2e+06) is vacuous" in told
    assert "needs L <= 1.5e-12" in told
