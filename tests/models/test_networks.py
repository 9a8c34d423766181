from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.networks import NETWORKS, Flat, Routed, network, route


@pytest.mark.parametrize("name", NETWORKS)
def test_encoders_and_decoders_of_every_family_fit_each_other(name: str) -> None:
    model, shape = ModelConfig(network=name, hidden=(8,), latent=4), (1, 28, 28)
    statistics = NETWORKS[name].encoder(model, shape)(torch.rand(2, *shape))
    assert statistics.shape == (2, 8)
    assert NETWORKS[name].decoder(model, shape, 4)(statistics[:, :4]).shape == (2, *shape)


def test_mlp_widths_are_those_of_the_configuration_mirrored_in_the_decoder() -> None:
    def widths(module: nn.Module) -> list[tuple[int, int]]:
        return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]

    model = ModelConfig(hidden=(8, 4), latent=3)
    assert widths(network("mlp").encoder(model, (2, 5))) == [(10, 8), (8, 4), (4, 6)]
    assert widths(network("mlp").decoder(model, (2, 5), 3)) == [(3, 4), (4, 8), (8, 10)]


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model.network: unknown network 'mpl'; did you mean 'mlp'\?"):
        network("mpl")


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
def test_every_row_goes_through_the_branch_of_its_own_group(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    branches = {group: Flat((4,), (5,), shape) for group in (3, 0, 7)}
    z, group = torch.randn(8, 4), torch.tensor([0, 7, 3, 3, 0, 7, 7, 0])
    routed = route(Routed(branches), z, group)
    for row in range(8):
        torch.testing.assert_close(routed[row], branches[int(group[row])](z[row : row + 1])[0])
    assert routed.shape == (8, *shape)


def test_a_block_without_branches_ignores_the_groups() -> None:
    block = nn.Linear(4, 2)
    z = torch.randn(3, 4)
    assert torch.equal(route(block, z, torch.tensor([0, 5, 1])), block(z))


def test_a_branch_that_no_row_belongs_to_gets_an_exactly_zero_gradient() -> None:
    routed = Routed({0: nn.Linear(4, 2), 1: nn.Linear(4, 2)})
    route(routed, torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in routed.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for n, g in gradients.items() if n.startswith("branches.0"))
    assert all(g is not None and g.abs().sum() == 0 for n, g in gradients.items() if n.startswith("branches.1"))
