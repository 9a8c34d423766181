"""Convolutions as matrix products equal torch's own, alone and as a stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from fedloom.engines.fused_layers import MatrixConv2d, StackedGroupNorm, StackedLinear, rewritten

CASES = {
    "halving": nn.Conv2d(3, 5, 4, 2, 1),
    "halving an odd side": nn.Conv2d(3, 5, 4, 2, (2, 1)),
    "kernel no multiple of its stride": nn.Conv2d(3, 5, (3, 5), (2, 3), (0, 2)),
    "stride larger than its kernel": nn.Conv2d(3, 5, 1, 2),
    "stride 1, no bias": nn.Conv2d(3, 5, 3, 1, 1, bias=False),
    "doubling": nn.ConvTranspose2d(3, 5, 4, 2, 1),
    "doubling to an odd side": nn.ConvTranspose2d(3, 5, 4, 2, 2, (1, 1)),
    "transposed, kernel no multiple": nn.ConvTranspose2d(3, 5, (3, 5), (2, 3), (0, 2), (1, 2)),
    "transposed, large stride": nn.ConvTranspose2d(3, 5, 1, 2, bias=False),
}


@pytest.mark.parametrize("layer", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_those_of_torch(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 7, 10, generator=generator).double().requires_grad_()
    layer = layer.double()
    ours, theirs = MatrixConv2d(layer)(x), layer(x)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    for mine, wanted in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted)


def test_a_stack_equals_its_members_and_keeps_its_names() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1))

    members = [network() for _ in range(3)]
    parameters, _ = stack_module_state(members)
    template = network()
    assert rewritten(template, matrix_convolutions=True) == 2
    assert [name for name, _ in template.named_parameters()] == list(parameters)
    x = torch.randn(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    outputs = vmap(lambda p, rows: functional_call(template, p, (rows,)))(parameters, x)
    for member, rows, output in zip(members, x, outputs, strict=True):
        torch.testing.assert_close(output, member(rows))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, padding="same")]
)
def test_rarer_convolutions_stay_as_they_are(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    assert rewritten(model, matrix_convolutions=True) == 0
    assert model[0] is layer


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5, 3)])
def test_group_norm_is_that_of_torch(affine: bool, shape: tuple[int, ...]) -> None:
    layer = nn.GroupNorm(3, 6, affine=affine)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(StackedGroupNorm(layer)(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)])
def test_linear_is_that_of_torch(bias: bool, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(6, 3, bias=bias)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(StackedLinear(layer)(x), layer(x))
