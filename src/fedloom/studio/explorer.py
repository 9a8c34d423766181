"""From a place in the latent space to an image, fast enough to follow a finger.

Places are those of the noise that a pathway starts from: N(0, I) around the prior's mean, whatever the method. Noise
that comes in on the way, such as that of p(z1 | z2), stays at its mean.

More than two dimensions are walked along main directions: the eigenvectors of E[J' J], J the Jacobian of the image by
the noise, so that the first moves the image most (the active subspace of Constantine, Dow and Wang, 2014, "Active
Subspace Methods in Theory and Practice"). No record is looked at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError, unknown
from fedloom.methods.base import Pathway, SampleInputs
from fedloom.methods.generator import Generator
from fedloom.modalities.base import modality_of
from fedloom.outline import in_outline
from fedloom.streams import Streams

REACH = 3.0  # how far from the mean a slider goes: 3 standard deviations
MOST_DIRECTIONS = 8
ATLAS = 11  # images on a side of the plane
STRIP = 9  # images between two
PLACES = 8  # around which the Jacobian is averaged
STEP = 0.05  # of its finite differences
MOST_DRAWS = 10_000  # numbers that stand for a random place
AT_ONCE = 512  # rows through the decoder


@dataclass(frozen=True)
class View:
    """Whose images are looked at, and how they come about; what is left empty is the default."""

    group: str = ""
    prior: str = ""  # the group whose prior is sampled
    pathway: str = ""
    label: str = ""  # the class, where the pathway is told one


@dataclass(frozen=True)
class Directions:
    """The main directions as columns, and which part of all change each makes."""

    __repr__ = in_outline

    axes: Tensor  # (dimensions, directions)
    shares: tuple[float, ...]


@dataclass
class Explorer:
    """The generators of one checkpoint, with their models built once."""

    generator: Generator
    round: int
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _directions: dict[View, Directions] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.generator.pathways:
            raise ConfigError(f"method '{self.generator.method.name}' has no generator at the server to explore")
        one = self.images(self.settled(View()), torch.zeros(1, self.dimensions(self.settled(View()))))
        shape = tuple(one.shape[1:])
        if modality_of(self.generator.kind, shape).tiles(one) is None:
            plural = modality_of(self.generator.kind, shape).plural
            raise ConfigError(f"{plural} of shape {shape} have no pictures, so there is nothing to look at")

    def settled(self, view: View) -> View:
        """The view with its defaults, if all of it is there."""
        groups, pathways = self.generator.groups, self.generator.pathways
        group = _one_of("group", view.group or groups[0], groups)
        pathway = _one_of("pathway", view.pathway or pathways[0], pathways)
        way = self.generator.method.pathways[pathway]
        prior = _one_of("prior", view.prior or group, groups) if way.uses_prior else ""
        label = (
            _one_of("class", view.label or self.generator.classes[0], self.generator.classes) if way.labelled else ""
        )
        return replace(view, group=group, prior=prior, pathway=pathway, label=label)

    def dimensions(self, view: View) -> int:
        """Of the noise that is walked through."""
        return math.prod(next(iter(self._way(view).noise.values())))

    def directions(self, view: View) -> Directions:
        """The axes as they are up to two dimensions, else the main directions."""
        with self._lock:
            if view not in self._directions:
                if len(self._directions) >= 64:
                    self._directions.clear()
                size = self.dimensions(view)
                self._directions[view] = (
                    Directions(torch.eye(size), ()) if size <= 2 else self._main_directions(view, size)
                )
            return self._directions[view]

    def _main_directions(self, view: View, size: int) -> Directions:
        around = Streams(0).normal("studio/places", PLACES, size)
        steps = STEP * torch.eye(size)
        products = torch.zeros(size, size, dtype=torch.float64)
        for place in around:
            change = self.images(view, torch.cat([place + steps, place - steps])).flatten(1).double()
            slopes = (change[:size] - change[size:]) / (2 * STEP)  # (dimensions, pixels): J'
            products += slopes @ slopes.T / PLACES
        values, vectors = torch.linalg.eigh(products)
        values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)[:, :MOST_DIRECTIONS]
        places = vectors.abs().argmax(dim=0)
        signs = vectors[places, torch.arange(vectors.shape[1])].sign()  # a direction has no sign of its own: fix one
        shares = (values / values.sum().clamp_min(1e-300))[: vectors.shape[1]]
        return Directions((vectors * signs).float(), tuple(shares.tolist()))

    def drawn(self, view: View, draw: int) -> Tensor:
        """A random place by its number; 0 is the mean."""
        if not 0 <= draw < MOST_DRAWS:
            raise ConfigError(f"draw = {draw} must be from 0 to {MOST_DRAWS - 1}")
        size = self.dimensions(view)
        return Streams(0).normal("studio/draw", 1, size, step=draw)[0] if draw else torch.zeros(size)

    def coordinates(self, view: View, draw: int) -> list[float]:
        """Where a random place lies along the main directions."""
        return [round(value, 3) for value in (self.drawn(view, draw) @ self.directions(view).axes).tolist()]

    def place(self, view: View, draw: int, values: Sequence[float]) -> Tensor:
        """The random place, moved along the main directions to where ``values`` say."""
        axes, start = self.directions(view).axes, self.drawn(view, draw)
        if len(values) != axes.shape[1] or not all(abs(value) <= 2 * REACH for value in values):
            raise ConfigError(f"values must be {axes.shape[1]} numbers from {-2 * REACH:g} to {2 * REACH:g}")
        return start + axes @ (torch.tensor(values) - start @ axes)

    def atlas(self, view: View, draw: int, values: Sequence[float]) -> Tensor:
        """Images all over the plane of the first two directions, row by row from the top left."""
        axes, here = self.directions(view).axes, self.place(view, draw, values)
        if axes.shape[1] < 2:
            raise ConfigError("a latent space of one dimension has no plane")
        line = torch.linspace(-REACH, REACH, ATLAS)
        grid = torch.stack([line.repeat(ATLAS), line.flip(0).repeat_interleave(ATLAS)], dim=1)
        middle = here - axes[:, :2] @ torch.tensor(values[:2])
        return self.images(view, middle + grid @ axes[:, :2].T)

    def between(self, view: View, ends: tuple[int, int], shares: Tensor) -> Tensor:
        """Images on the way from one random place to another, along the arc that keeps their length."""
        first, last = (self.drawn(view, draw) for draw in ends)
        angles = (shares * math.pi / 2).unsqueeze(1)
        return self.images(view, angles.cos() * first + angles.sin() * last)

    @torch.inference_mode()
    def images(self, view: View, places: Tensor) -> Tensor:
        """What the group's generator makes of places, one row each."""
        return torch.cat([self._generate(view, part) for part in torch.split(places, AT_ONCE)])

    def _generate(self, view: View, places: Tensor) -> Tensor:
        way, count, generator = self._way(view), len(places), self.generator
        walked, *others = way.noise
        noise = {walked: places.reshape(count, *way.noise[walked])}
        noise |= {name: torch.zeros(count, *way.noise[name]) for name in others}
        condition = (
            generator.classes.index(view.label) if way.labelled else generator.groups.index(view.prior or view.group)
        )
        group = torch.full((count,), generator.groups.index(view.group))
        return way.generate(self._model(view.group), SampleInputs(noise, group, torch.full((count,), condition)))

    def _model(self, group: str) -> nn.Module:
        if group not in self._models:
            self._models[group] = self.generator.model(group)
        return self._models[group]

    def _way(self, view: View) -> Pathway:
        return self.generator.method.pathways[view.pathway]


def _one_of(kind: str, name: str, allowed: Sequence[str]) -> str:
    if name not in allowed:
        raise ConfigError(unknown(kind, name, allowed))
    return name
