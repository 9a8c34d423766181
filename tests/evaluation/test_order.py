"""Distances grow with damage: the orders that truly hold, on real images, for pixels and for a network.

Beyond blur a network's order of noise, collapse and another domain depends on the domain (noise on garments is as
far away as digits are), so only pixels are asked for the full order.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedloom.backbones.base import Backbone
from fedloom.backbones.catalogue import load_backbone
from fedloom.evaluation.frechet import Moments, frechet_distance
from fedloom.evaluation.kernel import kernel_distance
from fedloom.evaluation.manifold import manifold_scores

pytestmark = pytest.mark.filterwarnings("ignore::fedloom.errors.FedloomWarning")
COUNT = 200


def blurred(x: Tensor, side: int) -> Tensor:
    return functional.avg_pool2d(x, side, stride=1, padding=side // 2)


def noisy(x: Tensor, level: float) -> Tensor:
    return (x + level * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)


def collapsed(x: Tensor, kept: int) -> Tensor:
    return x[:kept].repeat(len(x) // kept, 1, 1, 1)


@pytest.fixture(scope="module")
def network() -> Backbone:
    return load_backbone("efficientnet-lite0", resolution=64)


def distances(reference: Tensor, generated: list[Tensor]) -> dict[str, list[float]]:
    moments = Moments.of(reference)
    return {
        "frechet": [frechet_distance(moments, Moments.of(x)) for x in generated],
        "kernel": [kernel_distance(reference, x) for x in generated],
    }


@pytest.mark.parametrize("group", [0, 1])
def test_pixels_put_all_five_in_order(group: int, held_out: list[Tensor]) -> None:
    reference, real = held_out[group][:COUNT], held_out[group][COUNT : 2 * COUNT]
    damage = [real, blurred(real, 5), noisy(real, 0.3), collapsed(real, 5), held_out[1 - group][:COUNT]]
    for values in distances(reference.flatten(1), [x.flatten(1) for x in damage]).values():
        assert values == sorted(values)


@pytest.mark.parametrize("group", [0, 1])
def test_a_network_puts_real_first_and_blur_second(group: int, held_out: list[Tensor], network: Backbone) -> None:
    reference, real = held_out[group][:COUNT], held_out[group][COUNT : 2 * COUNT]
    damage = [real, blurred(real, 3), noisy(real, 0.3), collapsed(real, 5), held_out[1 - group][:COUNT]]
    reference_features, features = network.features(reference), [network.features(x) for x in damage]
    for same, blur, *worse in distances(reference_features, features).values():
        assert same < blur < min(worse)
    collapse = manifold_scores(reference_features, features[3])
    assert collapse.precision > 0.7
    assert collapse.recall < 0.05


@pytest.mark.parametrize(
    ("damage", "levels"), [(blurred, [1, 3, 5, 7]), (noisy, [0.0, 0.1, 0.2, 0.4]), (collapsed, [200, 50, 10, 2])]
)
def test_more_damage_is_farther_away(damage, levels, held_out: list[Tensor], network: Backbone) -> None:
    reference, real = network.features(held_out[0][:COUNT]), held_out[0][COUNT : 2 * COUNT]
    values = distances(reference, [network.features(damage(real, level)) for level in levels])["frechet"]
    assert values == sorted(set(values))
