"""How far a decoder can stretch its input: a certified bound, an estimate, a way to keep it small, and what follows.

A Lipschitz constant is no privacy guarantee by itself; the one theorem that claims to make it one is here as well, with
the sentence whether it says anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.func import jacfwd, vmap
from torch.nn import functional

from fedloom.errors import ConfigError
from fedloom.privacy.statistics import distributions

UPWARDS = 1 + 1e-9  # for the rounding of a singular value in float64


def overlap(layer: nn.Conv2d | nn.ConvTranspose2d) -> int:
    """In how many patches of a convolution one pixel can lie."""
    count = 1
    for kernel, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True):
        count *= math.ceil(kernel / (stride // math.gcd(stride, dilation)))
    return count


def _matrix_and_factor(layer: nn.Module) -> tuple[Tensor, float]:
    """A layer stretches by at most the largest singular value of the matrix, times the factor.

    A convolution multiplies its matrix with every patch, and the patches together are at most sqrt(overlap) times as
    long as the image; a transposed convolution is its adjoint, which stretches as much.
    """
    if isinstance(layer, nn.Linear):
        return layer.weight, 1.0
    assert isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
    if layer.groups != 1 or layer.padding_mode != "zeros":
        raise ConfigError("no Lipschitz constant is known for convolutions with groups or other padding than zeros")
    return layer.weight.flatten(1), math.sqrt(overlap(layer))


def _layer_constant(layer: nn.Module) -> float:
    matrix, factor = _matrix_and_factor(layer)
    return factor * float(torch.linalg.matrix_norm(matrix.detach().double(), 2)) * UPWARDS


class Bounded(nn.Module):
    """Stands in for a linear or convolutional layer, with the same parameters, and stretches by at most ``limit``.

    A weight that would stretch more is scaled down each time that it is used; there is no state, so that it can be
    vmapped, and each example's gradient is that of the scaled layer.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d | nn.ConvTranspose2d, limit: float) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.limit, self.factor = limit, _matrix_and_factor(layer)[1]
        self.apply_to = _computation(layer)

    def bounded(self) -> Tensor:
        """The weight that is used."""
        with torch.autocast(self.weight.device.type, enabled=False):  # rounding must not break the bound
            norm = self.factor * gram_norm(self.weight.flatten(1))
            return self.weight * torch.clamp(self.limit / norm, max=1.0)

    @torch.no_grad()
    def scaling(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a linear layer's weight is multiplied by, and the two vectors whose outer product is its gradient."""
        longer = _upright(matrix)
        bound, direction = _steepest(longer)
        pushed = longer @ direction
        share = self.limit / (self.factor * bound)
        scale = share.clamp(max=1.0)
        slope = torch.where(share <= 1.0, -scale / (pushed.square().sum() + _tiny(matrix)), 0.0)
        left, right = (pushed, direction) if longer is matrix else (direction, pushed)
        return scale, slope * left.squeeze(1), right.squeeze(1)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on a batch, with its weight scaled down to the limit."""
        return self.apply_to(x, self.bounded(), self.bias)


def _computation(layer: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if isinstance(layer, nn.Linear):
        return functional.linear
    assert isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
    stride, padding, dilation = layer.stride, layer.padding, layer.dilation
    assert not isinstance(padding, str), "the house pads by numbers"
    if isinstance(layer, nn.Conv2d):
        return partial(functional.conv2d, stride=stride, padding=padding, dilation=dilation)
    return partial(
        functional.conv_transpose2d,
        stride=stride,
        padding=padding,
        output_padding=layer.output_padding,
        dilation=dilation,
    )


def _bounded_constant(layer: Bounded) -> float:
    matrix = layer.bounded().detach().double().flatten(1)
    return layer.factor * float(torch.linalg.matrix_norm(matrix, 2)) * UPWARDS


LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
_MODULES: dict[type[nn.Module], Callable[..., float]] = {
    nn.Linear: _layer_constant,
    nn.Conv2d: _layer_constant,
    nn.ConvTranspose2d: _layer_constant,
    Bounded: _bounded_constant,
    nn.ReLU: lambda _: 1.0,
    nn.LeakyReLU: lambda layer: max(1.0, abs(layer.negative_slope)),
    nn.Tanh: lambda _: 1.0,
    nn.Softplus: lambda _: 1.0,
    nn.Sigmoid: lambda _: 0.25,
    nn.Flatten: lambda _: 1.0,
    nn.Unflatten: lambda _: 1.0,
    nn.Identity: lambda _: 1.0,
}
_METHODS = {"flatten": 1.0, "reshape": 1.0, "view": 1.0, "squeeze": 1.0, "unsqueeze": 1.0, "sigmoid": 0.25, "tanh": 1.0}


class _Tracer(fx.Tracer):
    """Looks into every module except the layers whose constants are known."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, tuple(_MODULES)) or super().is_leaf_module(m, module_qualified_name)


def certified_constant(network: nn.Module) -> float:
    """A number that |f(a) - f(b)| / |a - b| cannot exceed, for any two inputs: the product over the layers.

    Followed through the network's own program, so that nothing which it does on the way can be missed. The mean image
    of a decoder that gives logits is ``nn.Sequential(decoder, nn.Sigmoid())``.
    """
    network = nn.Sequential(network)  # a single layer is a network too
    constants: dict[fx.Node, float] = {}
    modules = dict(network.named_modules())
    for node in _Tracer().trace(network).nodes:
        inputs = [constants[argument] for argument in node.all_input_nodes]
        if node.op == "placeholder":
            if constants:
                raise ConfigError("a Lipschitz constant needs a network of one input")
            constants[node] = 1.0
        elif node.op == "output":
            return inputs[0]
        elif node.op == "call_module":
            constants[node] = inputs[0] * _module_constant(modules[str(node.target)])
        elif node.op == "call_method" and node.target in _METHODS and len(inputs) == 1:
            constants[node] = inputs[0] * _METHODS[str(node.target)]
        else:
            raise ConfigError(f"no Lipschitz constant is known for '{node.target}'")
    raise AssertionError("a network has an output")


def _module_constant(module: nn.Module) -> float:
    for kind, constant in _MODULES.items():
        if isinstance(module, kind):
            return constant(module)
    raise ConfigError(f"no useful Lipschitz constant is known for {type(module).__name__}")


def sampled_constant(function: Callable[[Tensor], Tensor], points: Tensor, chunk: int = 64) -> float:
    """The largest stretch at these points (n, k), each exact; the true constant may be larger anywhere else."""

    def one(point: Tensor) -> Tensor:
        return function(point.unsqueeze(0)).flatten()

    with torch.no_grad():
        stretches = [torch.linalg.matrix_norm(vmap(jacfwd(one))(part), 2).max() for part in torch.split(points, chunk)]
    return float(torch.stack(stretches).max())


def gram_norm(matrix: Tensor, squarings: int = 5) -> Tensor:
    """At least the largest singular value, and at most rank^(1/2^(squarings + 2)) times that; without state.

    Delattre, Barthelemy, Araujo, Allauzen, "Efficient bound of Lipschitz constant for convolutional layers by Gram
    iteration" (ICML 2023): |G^(2^k)|_F^(1/2^(k+1)) for G = W^T W, rescaled on the way. The gradient is that of the
    stretch along the steepest direction, a column of the last power: to go back through all products would cost as
    much again as many times as there are examples whose gradients are kept apart.
    """
    longer = _upright(matrix)
    bound, direction = _steepest(longer, squarings)
    stretch = ((longer @ direction).square().sum() + _tiny(matrix)).sqrt()
    return bound * (stretch / stretch.detach())


@torch.no_grad()
def _steepest(longer: Tensor, squarings: int = 5) -> tuple[Tensor, Tensor]:
    """The bound of :func:`gram_norm`, and a direction (columns, 1) in which a matrix stretches almost so much."""
    tiny = _tiny(longer)
    scale = longer.abs().amax() + tiny
    gram = (longer / scale).mT @ (longer / scale)
    log = gram.new_zeros(())
    for _ in range(squarings):
        size = gram.norm() + tiny
        gram = gram / size
        log = 2 * (log + size.log())
        gram = gram @ gram
    bound = scale * torch.exp((log + torch.log(gram.norm() + tiny)) / 2 ** (squarings + 1))
    column = gram.diagonal().argmax().reshape(1, 1).expand(len(gram), 1)
    direction = functional.normalize(torch.take_along_dim(gram, column, dim=1), dim=0)
    return bound * (1 + 1e-5), direction  # a little more, for the rounding in float32


def _upright(matrix: Tensor) -> Tensor:
    """It or its transpose, which stretches as much: the one with the smaller Gram matrix."""
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def _tiny(matrix: Tensor) -> float:
    return torch.finfo(matrix.dtype).tiny


def bound_spectrally(network: nn.Module, limit: float) -> nn.Module:
    """Keep every linear and convolutional layer's stretch within ``limit``, whatever training does to its weights."""
    if not limit > 0:
        raise ConfigError(f"the Lipschitz limit of a layer is {limit}; it must be greater than 0")
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LAYERS):
                setattr(parent, name, Bounded(child, limit))
    return network


def bounded_decoder(decoder: nn.Module, constant: float, steepness: float = 0.25) -> nn.Module:
    """A decoder whose mean image has a Lipschitz constant of at most ``constant``: each layer takes its part.

    The mean has a constant of ``steepness`` itself, 1/4 for a sigmoid: the layers together may stretch so much more.
    """
    layers = sum(isinstance(module, LAYERS) for module in decoder.modules())
    return bound_spectrally(decoder, (constant / steepness) ** (1 / layers))


def latent_radius(latent: int, delta: float) -> float:
    """The radius that a standard normal vector exceeds with probability ``delta``."""
    return float(distributions().chi.isf(delta, latent))


@dataclass(frozen=True)
class AlignBound:
    """Theorem A.5 of ALIGN-FL (Gulati, Gross, Wunder, 2025) at work."""

    alpha: float  # 2 L R_z R_x
    epsilon: float  # 2 T n sqrt(alpha)

    @property
    def vacuous(self) -> bool:
        """Total variation is bounded by 2 sqrt(alpha), and never exceeds 1."""
        return self.alpha >= 0.25

    @property
    def sentence(self) -> str:
        """What a report may say."""
        if self.vacuous:
            why = f"alpha = {self.alpha:.3g} is at least 1/4, where its bound on total variation exceeds 1"
            return f"no DP guarantee: the bound (epsilon {self.epsilon:.3g}) is vacuous, since {why}"
        return (
            f"no DP guarantee: the bound (epsilon {self.epsilon:.3g}) is not vacuous, but its proof is not published, "
            "it adds total variation as if that were epsilon, and it covers noisy samples, not the decoder itself"
        )


def align_bound(lipschitz: float, data_radius: float, latent_radius: float, rounds: int, released: int) -> AlignBound:
    """The theorem's epsilon for so many rounds with so many released points; its Figure 6 varies ``data_radius``."""
    for name, value in {"lipschitz": lipschitz, "data_radius": data_radius, "latent_radius": latent_radius}.items():
        if not value >= 0:
            raise ConfigError(f"{name} is {value}; it must be at least 0")
    alpha = 2 * lipschitz * latent_radius * data_radius
    return AlignBound(alpha, 2 * rounds * released * math.sqrt(alpha))
