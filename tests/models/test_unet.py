"""How much a training step of a flow's network keeps, and sizes of images that it takes or refuses."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.models.unet import Embedding, FlowUNet, Middle, UNetSize, WayDown, WayUp
from fedloom.objectives.base import Step
from fedloom.objectives.rectified_flow import RectifiedFlow

FLOAT = 4


def network(channels: int, size: UNetSize) -> FlowUNet:
    return FlowUNet(Embedding(size, 0, 0), WayDown(channels, size), Middle(size), WayUp(channels, size))


def numbers_kept(image: tuple[int, ...], size: UNetSize) -> float:
    """What autograd keeps of one example beside the weights, each piece of memory once."""
    model, objective, kept = network(image[0], size), RectifiedFlow(image), dict[int, torch.Tensor]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    nobody = torch.zeros(1, dtype=torch.int64)
    noise = {name: torch.zeros(1, *shape) for name, shape in objective.noise.items()}
    batch = Batch(torch.zeros(1, *image), nobody, nobody, torch.ones(1))
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        objective(model, Step(batch, noise, {}, RoundContext(1, 1, ())))
    return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - weights) / FLOAT


@pytest.mark.parametrize(
    ("image", "size"),
    [
        ((1, 28, 28), UNetSize((16, 32, 64), 1, 1, 0.0)),
        ((3, 32, 32), UNetSize((64, 128, 256), 1, 1, 0.0)),
        ((3, 32, 32), UNetSize((32, 64), 2, 2, 0.0)),
        ((1, 64, 64), UNetSize((16, 32, 48), 1, 2, 0.0)),
        ((3, 64, 96), UNetSize((16, 32, 48), 1, 0, 0.0)),
        ((3, 128, 128), UNetSize((32, 64, 96, 128), 1, 1, 0.0)),
    ],
)
def test_the_rule_for_memory_says_what_a_step_keeps(image: tuple[int, ...], size: UNetSize) -> None:
    assert size.numbers(image) == pytest.approx(numbers_kept(image, size), rel=0.2)


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (1, 64, 64), (3, 96, 64), (3, 128, 128)])
def test_images_of_all_sizes_go_through_and_none_is_left_out_of_the_gradient(image: tuple[int, ...]) -> None:
    size = UNetSize((4, 4, 8), 1, 1, 0.0)
    size.check(image)
    model = network(image[0], size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, nobody = torch.rand(2, *image), torch.zeros(2, dtype=torch.int64)
    found = model.velocity(x, torch.full((2, 1), 0.3), nobody, nobody)
    assert found.shape == x.shape
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("image", [(1, 30, 28), (3, 32, 62)])
def test_sides_that_cannot_be_halved_are_refused_by_name(image: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"divisible by 4; these have {image[1]} x {image[2]} pixels: give data.size"):
        UNetSize((4, 4, 8), 1, 1, 0.0).check(image)
