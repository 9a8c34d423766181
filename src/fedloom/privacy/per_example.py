"""Gradients of single examples as the factors that layers already have at hand.

The gradient of one example with respect to a linear layer's weight is (gradient at its output) x (its input), so norms
and weighted sums need no tensor that is as large as the weights times the batch (Goodfellow, "Efficient per-example
gradient computations", 2015; Bu et al., "Differentially private optimization on large model at small cost", ICML 2023).
A convolution is a linear layer on patches; a transposed one has patches at its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from fedloom.errors import ConfigError
from fedloom.outline import in_outline
from fedloom.privacy.gradient_forms import Form, Outer, Rows, Total, Whole
from fedloom.privacy.lipschitz import Bounded

Result = TypeVar("Result")


def _outer(left: Tensor, right: Tensor, shape: torch.Size, bias: Tensor | None = None) -> dict[str, Form]:
    """A layer whose weight has the outer products of two factors; its bias has the sums of ``bias``, else of left."""
    rows = Rows(left)
    return {"weight": Outer(rows, Rows(right), shape), "bias": Total(rows if bias is None else Rows(bias))}


def _linear(layer: nn.Linear, x: Tensor, gradient: Tensor, _: Tensor | None) -> dict[str, Form]:
    left, right = gradient.reshape(len(x), -1, layer.out_features), x.reshape(len(x), -1, layer.in_features)
    return _outer(left, right, layer.weight.shape)


def _bounded(layer: Bounded, x: Tensor, gradient: Tensor, weight: Tensor) -> dict[str, Form]:
    """The weight is scaled by a number that depends on it, whose gradient is one outer product for all examples."""
    out, into = weight.shape
    left, right = gradient.reshape(len(x), -1, out), x.reshape(len(x), -1, into)
    scale, steeper, along = layer.scaling(weight)
    felt = (left * (right @ weight.mT)).sum(dim=(1, 2))  # each loss's derivative with respect to that number
    both = torch.cat([scale * left, felt[:, None, None] * steeper], dim=1)
    return _outer(both, torch.cat([right, along.expand(len(x), 1, into)], dim=1), weight.shape, bias=left)


def _conv(layer: nn.Conv2d, x: Tensor, gradient: Tensor, _: Tensor | None) -> dict[str, Form]:
    # A stride may leave a remainder at the border that no patch covers; both count the same places.
    patches = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    return _outer(gradient.flatten(2).mT, patches.mT, layer.weight.shape)


def _transposed_conv(layer: nn.ConvTranspose2d, x: Tensor, gradient: Tensor, _: Tensor | None) -> dict[str, Form]:
    patches = functional.unfold(gradient, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    return _outer(x.flatten(2).mT, patches.mT, layer.weight.shape, bias=gradient.flatten(2).mT)


def _group_norm(layer: nn.GroupNorm, x: Tensor, gradient: Tensor, _: Tensor | None) -> dict[str, Form]:
    grouped = x.reshape(len(x), layer.num_groups, -1)  # by a layer norm, because a group norm cannot be vmapped
    normal = functional.layer_norm(grouped, grouped.shape[2:], eps=layer.eps).reshape(x.shape)
    return {
        "weight": Whole((gradient * normal).flatten(2).sum(dim=2)),
        "bias": Whole(gradient.flatten(2).sum(dim=2)),
    }


RULES: dict[type[nn.Module], Callable[..., dict[str, Form]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.ConvTranspose2d: _transposed_conv,
    nn.GroupNorm: _group_norm,
    Bounded: _bounded,
}


def _joined(layer: str, leaf: str) -> str:
    return f"{layer}.{leaf}" if layer else leaf


def _has_rule(layer: nn.Module) -> bool:
    if isinstance(layer, Bounded):
        return layer.weight.dim() == 2  # a convolution's patches are its own affair
    plain = getattr(layer, "groups", 1) == 1 and getattr(layer, "padding_mode", "zeros") == "zeros"
    return type(layer) in RULES and plain and not isinstance(getattr(layer, "padding", 0), str)


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a layer."""

    __repr__ = in_outline

    name: str
    layer: nn.Module
    x: Tensor
    output: Tensor


class Watch:
    """While it is entered, notes what goes into and comes out of every layer that owns one of the parameters."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.calls: list[Call] = []
        self._names = frozenset(names)
        self._noting = True
        self._taps: Sequence[Tensor] = ()
        owners = {name.rpartition(".")[0] for name in names}
        self.layers = {owner: model.get_submodule(owner) for owner in owners}
        self._handles: list[RemovableHandle] = []

    @property
    def complete(self) -> bool:
        """Whether every parameter belongs to a layer whose rule is known."""
        return all(_has_rule(layer) for layer in self.layers.values())

    def __enter__(self) -> Watch:
        for name, layer in self.layers.items():
            self._handles.append(layer.register_forward_hook(self._note(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _note(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not self._noting or not torch.is_grad_enabled():  # without gradients it is a constant of this loss
                return output
            if self._taps:
                output = output + self._taps[len(self.calls)].to(output.dtype)
            self.calls.append(Call(name, layer, inputs[0], output))
            return output

        return hook

    def tapped(self, function: Callable[[], Result], taps: Sequence[Tensor]) -> tuple[Result, list[Tensor]]:
        """What a function gives while taps, one for each call in order, are added to the outputs; and the inputs.

        With zeros that changes nothing, and the gradient at a tap is the gradient at that output, even where outputs
        cannot be reached afterwards (inside ``vmap``). A watch that is used like this stays entered and notes nothing
        at other times.
        """
        self.calls, self._taps, self._noting = [], taps, True
        result = function()
        inputs = [call.x for call in self.calls]
        self.calls, self._taps, self._noting = [], (), False
        return result, inputs

    @property
    def needed(self) -> list[str]:
        """Weights that rules ask for beside inputs and gradients."""
        return [_joined(name, "weight") for name, layer in self.layers.items() if isinstance(layer, Bounded)]

    def forms(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, Form]:
        """Every example's gradient for every parameter that was reached; a pure function of tensors.

        ``inputs`` are what went into the calls, ``gradients`` those of the losses at their outputs, and ``weights`` the
        needed ones, where they are not those of the layers.
        """
        forms: dict[str, Form] = {}
        for call, x, gradient in zip(self.calls, inputs, gradients, strict=True):
            name = _joined(call.name, "weight")
            weight = cast("Tensor", call.layer.weight).detach() if weights is None else weights.get(name)
            for leaf, form in RULES[type(call.layer)](call.layer, x, gradient, weight).items():
                name = _joined(call.name, leaf)
                if name in self._names:
                    forms[name] = forms[name] + form if name in forms else form
        return forms


def watched_gradients(values: Tensor, watch: Watch) -> dict[str, Form]:
    """The factored gradients of per-example losses whose computation was watched."""
    for call in watch.calls:
        if len(call.x) != len(values):
            raise ConfigError(
                f"layer '{call.name}' saw {len(call.x)} rows for {len(values)} examples: "
                "under DP-SGD each row of a layer must belong to one example"
            )
    outputs = [call.output for call in watch.calls]
    gradients = torch.autograd.grad(values.sum(), outputs, allow_unused=True, materialize_grads=True)
    return watch.forms([call.x.detach() for call in watch.calls], gradients)


class _Marked(torch.autograd.Function):
    """The identity, which notes when somebody asks for a derivative that can itself be differentiated."""

    @staticmethod
    def forward(output: Tensor, _: set[str]) -> Tensor:
        """The output as it is; only its derivatives are watched."""
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, set[str]], _: Tensor) -> None:
        """Keep the set that a derivative is noted in."""
        ctx.derived = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Gradients are enabled only where they are to have gradients themselves."""
        if torch.is_grad_enabled():
            ctx.derived.add("layer")
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """A derivative taken forwards is noted like one taken backwards."""
        ctx.derived.add("layer")
        return tangent.view_as(tangent)


def layers_suffice(losses: Callable[[], Tensor], watch: Watch, parameters: Mapping[str, Tensor]) -> bool:
    """Whether a watch misses nothing: no layer without a rule, none whose derivative is a part of the losses, and no
    parameter used behind its layer's back.

    Each layer is handed constants in place of its parameters; whatever the losses still depend on is used elsewhere.
    """
    if not watch.complete:
        return False
    owned: dict[nn.Module, dict[str, nn.Parameter | None]] = {layer: {} for layer in watch.layers.values()}

    def hide(layer: nn.Module, _: Any) -> None:
        owned[layer] = dict(layer._parameters)
        layer._parameters.update({n: p if p is None else p.detach() for n, p in owned[layer].items()})  # type: ignore[misc]

    def bring_back(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        layer._parameters.update(owned[layer])
        return cast("Tensor", _Marked.apply(output, derived))  # type: ignore[no-untyped-call]

    derived: set[str] = set()  # no list, which would be copied inside a derivative
    handles = [layer.register_forward_pre_hook(hide) for layer in owned]
    handles += [layer.register_forward_hook(bring_back) for layer in owned]
    try:
        values = losses()
    finally:
        for handle in handles:
            handle.remove()
    if derived or not values.requires_grad:
        return not derived
    left = torch.autograd.grad(values.sum(), list(parameters.values()), allow_unused=True)
    return all(gradient is None for gradient in left)
