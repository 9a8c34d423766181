"""The networks that blocks are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError, unknown


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class MLPEncoder(nn.Module):
    """q(z | x): an MLP from the flattened example to mean and log variance of a diagonal Gaussian, side by side."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], latent: int) -> None:
        super().__init__()
        self.layers = mlp([math.prod(shape), *hidden, 2 * latent])

    def forward(self, x: Tensor) -> Tensor:
        """Encode a batch."""
        statistics: Tensor = self.layers(x.flatten(1))
        return statistics


class MLPDecoder(nn.Module):
    """p(x | z): an MLP from the latent to the parameters of the likelihood, in the shape of an example."""

    def __init__(self, latent: int, hidden: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.layers = mlp([latent, *hidden, math.prod(shape)])

    def forward(self, z: Tensor) -> Tensor:
        """Decode a batch."""
        pixels: Tensor = self.layers(z)
        return pixels.reshape(-1, *self.shape)


class Routed(nn.Module):
    """Several branches of one block, one for each group; every row goes through the branch of its own group."""

    def __init__(self, branches: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({str(group): branch for group, branch in branches.items()})

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        """Run all branches on the whole batch and keep each row's own: fixed shapes, whatever the mix of groups."""
        result: Tensor | None = None
        for name, branch in self.branches.items():
            mine = branch(x)
            own = (group == int(name)).reshape(-1, *[1] * (mine.dim() - 1))
            result = mine if result is None else torch.where(own, mine, result)
        assert result is not None, "a routed block has at least one branch"
        return result


def route(block: nn.Module, x: Tensor, group: Tensor) -> Tensor:
    """Call a block that may or may not have a branch for each group."""
    output: Tensor = block(x, group) if isinstance(block, Routed) else block(x)
    return output


@dataclass(frozen=True)
class Network:
    """A family of networks that ``model.network`` can name."""

    summary: str
    encoder: Callable[[ModelConfig, tuple[int, ...]], nn.Module]  # x -> mean and log variance, side by side
    decoder: Callable[[ModelConfig, tuple[int, ...]], nn.Module]  # z -> parameters of the likelihood


def _mlp_encoder(model: ModelConfig, shape: tuple[int, ...]) -> nn.Module:
    return MLPEncoder(shape, model.hidden, model.latent)


def _mlp_decoder(model: ModelConfig, shape: tuple[int, ...]) -> nn.Module:
    return MLPDecoder(model.latent, tuple(reversed(model.hidden)), shape)


NETWORKS: dict[str, Network] = {
    "mlp": Network("linear layers of the widths in model.hidden, mirrored in the decoder", _mlp_encoder, _mlp_decoder)
}


def network(name: str) -> Network:
    """The family of that name."""
    if name not in NETWORKS:
        raise ConfigError("model.network: " + unknown("network", name, NETWORKS))
    return NETWORKS[name]
