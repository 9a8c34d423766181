"""DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016) as a value that knows its own cost.

One step: a Poisson sample; the gradient of each example, over all blocks of the phase jointly, clipped to a bound;
their sum with normal noise; divided by the public expected size of a batch. Any optimiser may follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.outline import in_outline
from fedloom.privacy.accounting import Event, Gaussian, NoGuarantee
from fedloom.privacy.clipping import Clipping, Count, Fixed, Lengths, clip_factors
from fedloom.privacy.gradient_forms import Form, by_subject, joint_norms
from fedloom.privacy.noise import NoiseKey, Randomness
from fedloom.privacy.trust import Local, Trust


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """What one or more passes over a batch add up to, over the public expected size of a batch, before noise."""

    __repr__ = in_outline

    gradients: Mapping[str, Tensor]
    below: Tensor  # for each example 1/2 if its norm is within the bound, else -1/2
    bound: Tensor

    def __add__(self, other: ClippedSum) -> ClippedSum:
        gradients = {name: mine + other.gradients[name] for name, mine in self.gradients.items()}
        return ClippedSum(gradients, self.below + other.below, torch.maximum(self.bound, other.bound))


@dataclass(frozen=True, eq=False)
class Scale:
    """What differs between silos of one mechanism, over the expected batch; tensors for several silos at once."""

    __repr__ = in_outline

    example: float | Tensor  # what one example counts
    gradient: float | Tensor  # standard deviation of the noise on the sum of gradients, in clip bounds
    count: float | Tensor  # standard deviation of the noise on the count of norms within the bound


@dataclass(frozen=True)
class DPSGD:
    """The mechanism; ``noise_multiplier`` and ``rate`` are what is accounted for each step."""

    noise_multiplier: float
    rate: float  # the probability of each record (or subject) to be in a batch
    expected: float  # the public expected number of records (or subjects) in a batch
    clipping: Clipping = field(default_factory=Fixed)
    unit: Literal["record", "subject"] = "record"
    blocks: tuple[str, ...] = ()  # only these are clipped and noised, as some papers do; all if empty
    trust: Trust = field(default_factory=Local)

    def __post_init__(self) -> None:
        Gaussian(self.noise_multiplier, self.rate)  # complains about either
        if not self.expected > 0:
            raise ConfigError(f"the expected batch size is {self.expected}; it must be greater than 0")

    @property
    def problem(self) -> str:
        """Why there is no DP guarantee; empty where there is one."""
        if self.blocks:
            return f"only {', '.join(self.blocks)} is privatised, beside blocks that are trained on the records"
        if self.noise_multiplier == 0:
            return "no noise is added"
        return self.clipping.problem

    @property
    def guarantee(self) -> str:
        """What may be said of the result; how much epsilon it took is the ledger's to say."""
        if self.problem:
            return f"no DP guarantee: {self.problem}"
        return f"differential privacy for one {self.unit} added or removed; {self.trust.sentence}"

    def event(self, steps: int) -> Event:
        """What so many steps cost, the search for the clip bound included."""
        return NoGuarantee(self.problem) if self.problem else Gaussian(self.noise_multiplier, self.rate, steps)

    @property
    def gradient_noise(self) -> float:
        """Standard deviation of the noise on the sum of gradients, in clip bounds.

        A sum with noise s/sqrt(1-c) and a count (sensitivity 1/2) with noise s/(2 sqrt(c)) cost as much as one sum
        with noise s.
        """
        return self.trust.share * self.noise_multiplier / math.sqrt(1 - self.clipping.share)

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count of norms within the bound."""
        share = self.clipping.share
        return self.trust.share * self.noise_multiplier / (2 * math.sqrt(share)) if share else 0.0

    def is_private(self, parameter: str) -> bool:
        """Whether a parameter of the phase is clipped and noised."""
        return not self.blocks or parameter.startswith(tuple(f"{block}." for block in self.blocks))

    def clipped_sum(
        self,
        values: Tensor,
        mask: Tensor,
        parameters: Mapping[str, Tensor],
        bound: Tensor,
        forms: Callable[[], Mapping[str, Form]],
        *,
        subject: Tensor | None = None,
    ) -> ClippedSum:
        """One pass: per-example losses to the sum of clipped gradients, over the expected batch.

        ``forms`` gives every example's gradients; it is asked last, because it may use the losses' graph up.
        ``subject`` says whose each row is, for the unit ``subject``.
        """
        private = {name: parameter for name, parameter in parameters.items() if self.is_private(name)}
        others = {name: parameter for name, parameter in parameters.items() if name not in private}
        plain = plain_sum(values, mask / self.expected, others)
        total = self.clip({name: form for name, form in forms().items() if name in private}, mask, bound, subject)
        unreached = {n: torch.zeros_like(p) for n, p in private.items() if n not in total.gradients}
        gradients = {**unreached, **total.gradients, **plain}
        return ClippedSum({name: gradients[name] for name in parameters}, total.below, total.bound)

    def clip(
        self,
        forms: Mapping[str, Form],
        mask: Tensor,
        bound: Tensor,
        subject: Tensor | None = None,
        scale: Scale | None = None,
    ) -> ClippedSum:
        """The sum of clipped gradients over real rows; a pure function of tensors.

        ``scale`` stands in for the mechanism's own, where the silos of one batched program differ in nothing else.
        """
        scale = scale or self.scale
        if self.unit == "subject":
            if subject is None:
                raise ConfigError("privacy.unit is 'subject', but the records do not say whose they are")
            forms, mask = by_subject(forms, subject, mask)
        forms = {name: form.condensed() for name, form in forms.items()}
        norms = joint_norms(forms)
        bound = self.clipping.bound(Lengths(norms, mask, bound))
        factors = clip_factors(norms, bound, mask)
        below = mask.new_zeros(())
        if self.clipping.share:  # or else nobody asks for it
            below = (((norms <= bound).to(mask.dtype) - 0.5) * mask).sum() * scale.example
        factors = (factors * scale.example).to(mask.dtype)  # here the division costs next to nothing
        return ClippedSum({name: form.weighted_sum(factors) for name, form in forms.items()}, below, bound)

    def draw(self, parameters: Mapping[str, Tensor], randomness: Randomness, noise_key: NoiseKey) -> dict[str, Tensor]:
        """Standard normal noise for each private parameter, and under the empty name for the count."""
        shapes = {name: parameter.shape for name, parameter in parameters.items() if self.is_private(name)}
        # On the host, whatever the device: only the numbers move.
        numbers = randomness.normal(1 + sum(map(math.prod, shapes.values())), noise_key)
        return divided(numbers.to(next(iter(parameters.values())).device), shapes)

    @property
    def scale(self) -> Scale:
        """Noise and examples, over the expected batch."""
        return Scale(1 / self.expected, self.gradient_noise / self.expected, self.count_noise / self.expected)

    def release(
        self, total: ClippedSum, noise: Mapping[str, Tensor], scale: Scale | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients that the optimiser may see, and the bound for the next step, for one silo or a stack of them.

        The sums are used up: noise is added in their place, in its own precision.
        """
        scale = scale or self.scale
        width = (scale.gradient * total.bound).to(noise[""].dtype)
        gradients = dict(total.gradients)
        for name in [name for name in gradients if name in noise]:
            gradient = gradients[name]
            column = width.reshape(*width.shape, *[1] * (gradient.dim() - width.dim()))
            gradients[name] = gradient.to(width.dtype).addcmul_(noise[name], column).to(gradient.dtype)
        if not self.clipping.share:
            return gradients, total.bound
        below = total.below + scale.count * noise[""] + 0.5
        return gradients, self.clipping.following(Count(below.to(total.bound.dtype), total.bound))


def divided(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Numbers in the last dimension as views of these shapes, and the one that is left under the empty name."""
    parts = torch.split(flat, [*map(math.prod, shapes.values()), 1], dim=-1)
    leading = flat.shape[:-1]
    views = {n: part.reshape(*leading, *shape) for (n, shape), part in zip(shapes.items(), parts[:-1], strict=True)}
    return {**views, "": parts[-1].squeeze(-1)}


def plain_sum(values: Tensor, mask: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the sum of losses that nothing guards; the losses' graph is used again."""
    if not parameters:
        return {}
    rows = torch.autograd.grad(
        (values * mask).sum(), list(parameters.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(parameters, rows, strict=True))


def compact(subject: Tensor) -> Tensor:
    """Number the subjects of a pass from 0, in whatever order."""
    numbers: Tensor = torch.unique(subject, return_inverse=True)[1]
    return numbers


def total_of(passes: Sequence[ClippedSum]) -> ClippedSum:
    """The sum over the passes of one batch."""
    total = passes[0]
    for other in passes[1:]:
        total = total + other
    return total
