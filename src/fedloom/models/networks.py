"""The networks that blocks are made of, in families that ``model.network`` and ``model.branches`` can name."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.convolutional import conv_decoder, conv_encoder
from fedloom.models.grid import grid_decoder, grid_encoder
from fedloom.registry import Registry

Shape = tuple[int, ...]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Flat(nn.Module):
    """An MLP between tensors of any shape: flattens its input, and gives its output the shape asked for."""

    def __init__(self, before: Shape, hidden: Sequence[int], after: Shape) -> None:
        super().__init__()
        self.shape = after
        self.layers = mlp([math.prod(before), *hidden, math.prod(after)])

    def forward(self, x: Tensor) -> Tensor:
        """A batch of the one shape to a batch of the other."""
        values: Tensor = self.layers(x.flatten(1))
        return values.reshape(-1, *self.shape)


class Routed(nn.Module):
    """Several branches of one block, one for each group; every row goes through the branch of its own group."""

    def __init__(self, branches: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({str(group): branch for group, branch in branches.items()})

    def forward(self, inputs: tuple[Any, ...], group: Tensor) -> Any:
        """Run all branches on the whole batch and keep each row's own: fixed shapes, whatever the mix of groups."""
        result: Any = None
        for name, branch in self.branches.items():
            mine, own = branch(*inputs), group == int(name)
            result = mine if result is None else tree_map(partial(_own_rows, own), mine, result)
        assert result is not None, "a routed block has at least one branch"
        return result


def _own_rows(own: Tensor, mine: Tensor, others: Tensor) -> Tensor:
    return torch.where(own.reshape(-1, *[1] * (mine.dim() - 1)), mine, others)


def route(block: nn.Module, x: Tensor, group: Tensor) -> Tensor:
    """Call a block that may or may not have a branch for each group."""
    output: Tensor = route_all(block, (x,), group)
    return output


def route_all(block: nn.Module, inputs: tuple[Any, ...], group: Tensor) -> Any:
    """The same for a block of several inputs, or that gives several tensors."""
    return block(inputs, group) if isinstance(block, Routed) else block(*inputs)


def mlp_encoder(model: ModelConfig, shape: Shape) -> nn.Module:
    """Layers of the widths in ``model.hidden``."""
    return Flat(shape, model.hidden, (2 * model.latent,))


def mlp_decoder(model: ModelConfig, shape: Shape, inputs: int) -> nn.Module:
    """The encoder's widths in reverse order."""
    return Flat((inputs,), model.hidden[::-1], shape)


def deeper_decoder(model: ModelConfig, shape: Shape, inputs: int) -> nn.Module:
    """Two more layers, each as wide as the widest."""
    return Flat((inputs,), (*model.hidden[::-1], *[max(model.hidden, default=model.latent)] * 2), shape)


def mlp_top_encoder(model: ModelConfig) -> nn.Module:
    """Layers of the widths in ``model.top_hidden``."""
    return Flat((model.latent,), model.top_hidden, (2 * model.top_latent,))


def mlp_top_decoder(model: ModelConfig) -> nn.Module:
    """The top encoder's widths in reverse order."""
    return Flat((model.top_latent,), model.top_hidden[::-1], (2 * model.latent,))


def deeper_top_decoder(model: ModelConfig) -> nn.Module:
    """Two more layers, each as wide as the widest."""
    return Flat(
        (model.top_latent,),
        (*model.top_hidden[::-1], *[max(model.top_hidden, default=model.top_latent)] * 2),
        (2 * model.latent,),
    )


@dataclass(frozen=True)
class Network:
    """A family of networks: one maker for each block of a VAE, given the configuration and the shape of an example.

    Encoders put out mean and log variance side by side; ``inputs`` widens a decoder's input, for conditions. A module,
    such as an ``nn.Sequential``, may stand in place of its maker: models have copies of it, with weights drawn anew::

        network = fedloom.Network(encoder, decoder).named("mine")
        config = fedloom.load_config("demo", ["model.network=mine", "model.latent=8"])
    """

    encoder: Callable[[ModelConfig, Shape], nn.Module] | nn.Module  # q(z1 | x)
    decoder: Callable[[ModelConfig, Shape, int], nn.Module] | nn.Module  # p(x | z1), with the number of inputs
    summary: str = "a network of one's own"
    top_encoder: Callable[[ModelConfig], nn.Module] = mlp_top_encoder  # q(z2 | z1)
    top_decoder: Callable[[ModelConfig], nn.Module] = mlp_top_decoder  # p(z1 | z2)

    def make_encoder(self, model: ModelConfig, shape: Shape) -> nn.Module:
        """q(z1 | x) with fresh weights."""
        if not isinstance(self.encoder, nn.Module):
            return self.encoder(model, shape)
        return _copied(self.encoder, shape, (2 * model.latent,), "encoder", "2 * model.latent numbers")

    def make_decoder(self, model: ModelConfig, shape: Shape, inputs: int) -> nn.Module:
        """p(x | z1) with fresh weights."""
        if not isinstance(self.decoder, nn.Module):
            return self.decoder(model, shape, inputs)
        return _copied(self.decoder, (inputs,), shape, "decoder", "records of their shape")

    def named(self, name: str) -> Network:
        """The same, known as ``model.network = name`` from now on; whoever loads the run later names it again."""
        NETWORKS.own[name] = self
        return self


def _copied(module: nn.Module, before: Shape, after: Shape, block: str, wanted: str) -> nn.Module:
    """A copy with weights drawn anew where its layers know how; refused where its shapes do not fit."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if callable(draw := getattr(layer, "reset_parameters", None)):
            draw()
    try:
        with torch.no_grad():
            found = tuple(copy.deepcopy(copied).eval()(torch.zeros(1, *before)).shape[1:])
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the {block} does not take what has shape {before}: {str(error).splitlines()[0]}") from error
    if found != after:
        raise ConfigError(f"the {block} gives {found} for one example, and is to give {after}: {wanted}")
    return copied


_OWN = {
    "mlp": Network(mlp_encoder, mlp_decoder, "linear layers of the widths in model.hidden, mirrored in the decoder"),
    "deeper-mlp": Network(
        mlp_encoder,
        deeper_decoder,
        "mlp with two more layers in each decoder",
        top_decoder=deeper_top_decoder,
    ),
    "conv": Network(
        conv_encoder,
        conv_decoder,
        "convolutions of the widths in model.channels, transposed in the decoder; linear layers above z1",
    ),
    "grid": Network(
        grid_encoder,
        grid_decoder,
        "convolutions alone, of the widths in model.channels; latents lie on the grid to which they halve an image",
    ),
    "deeper-mlp-conv": Network(
        mlp_encoder,
        conv_decoder,
        "deeper-mlp with transposed convolutions of the widths in model.channels as p(x|z1)",
        top_decoder=deeper_top_decoder,
    ),
}
NETWORKS: Registry[Network] = Registry("network", "fedloom.networks", Network, lambda: _OWN)


def network(name: str, field: str = "model.network") -> Network:
    """The family of that name."""
    return NETWORKS.get(name, field)


def widened(model: ModelConfig, family: Network, shape: Shape, times: int) -> ModelConfig:
    """The configuration with hidden layers so much wider that the decoder has about ``times`` as many parameters."""
    if times == 1:
        return model

    def scaled(factor: float) -> ModelConfig:
        hidden, channels = ([max(1, round(factor * width)) for width in w] for w in (model.hidden, model.channels))
        return replace(model, hidden=tuple(hidden), channels=tuple(channels))

    def parameters(candidate: ModelConfig) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in family.make_decoder(candidate, shape, model.latent).parameters())

    target, low, high = times * parameters(model), 1.0, float(times)
    for _ in range(30):  # the count grows with the factor, at most with its square
        middle = (low + high) / 2
        low, high = (middle, high) if parameters(scaled(middle)) < target else (low, middle)
    return scaled(high)
