"""From what a federation learned to new images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError, unknown
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, SampleInputs
from fedloom.methods.steps import ServerState
from fedloom.sharing.plan import BlockKey
from fedloom.streams import Streams

LABEL_SHARES = "label-shares"  # in the server's memory: of all groups, or a row for each
CHUNK = 1000  # rows of one draw; a fixed number, so that a sample does not depend on how many are asked for
AT_ONCE = {"cpu": 1, "cuda": 16}  # draws that pass through the model together


@dataclass(frozen=True)
class Generator:
    """The server's generators at one point of a run."""

    method: Method
    server: ServerState
    groups: tuple[str, ...]
    classes: tuple[str, ...] = ()
    kind: str = ""  # the name of the modality of what they make; "": that which its shape speaks for

    def model(self, group: str) -> nn.Module:
        """The model of a group with what the server holds; blocks that never leave a silo keep fresh weights."""
        site = Site("server", (self.groups.index(group),))
        model = self.method.build(site)
        model.load_state_dict(self.method.generating.join(self.server.sampled, site), strict=False)
        return model.eval()

    def missing(self, group: str, pathway: str) -> list[BlockKey]:
        """What a pathway would need for a group and never reached the server."""
        site, plan = Site("server", (self.groups.index(group),)), self.method.generating
        needed = (key for block in self.method.pathways[pathway].blocks for key in plan.prefixes(block, site).values())
        return [key for key in needed if key not in self.server.sampled]

    @property
    def pathways(self) -> tuple[str, ...]:
        """The ways in which images of every group can be generated."""
        return tuple(name for name in self.method.pathways if not any(self.missing(g, name) for g in self.groups))

    @property
    def teaches(self) -> bool:
        """Whether classifiers can learn from it, or are what it learned itself."""
        return all(way.labelled for way in self.method.pathways.values())

    @property
    def label_shares(self) -> Tensor:
        """How frequent each class is among samples, of which each group has as many."""
        return torch.stack([self.label_shares_of(group) for group in self.groups]).mean(dim=0)

    def label_shares_of(self, group: str) -> Tensor:
        """How frequent each class is in a group: as the silos' noisy counts say, else all alike; tempered."""
        alike = torch.full((len(self.classes),), 1.0 / len(self.classes), dtype=torch.float64)
        known = self.server.memory.get(LABEL_SHARES, alike)
        return self.tempered(known[self.groups.index(group)] if known.dim() > 1 else known)

    def class_of(self, asked: str) -> str:
        """The name of a class that is asked for by name, by what stands behind a / in one name alone, or by number."""
        found = [name for name in self.classes if name == asked]
        found = found or [name for name in self.classes if "/" in name and name.rpartition("/")[2] == asked]
        if not found and asked.isdecimal():
            found = list(self.classes[int(asked) :][:1])
        if len(found) != 1:
            raise ConfigError(unknown("class", asked, self.classes))
        return found[0]

    def tempered(self, shares: Tensor) -> Tensor:
        """Shares to the power of ``method.label_exponent``: 1 leaves them, 0 makes those above 0 equal."""
        powers = torch.where(shares > 0, shares**self.method.label_exponent, 0.0)
        return powers / powers.sum()

    def classes_of(self, asked: Iterable[str]) -> tuple[str, ...]:
        """The names of classes that are asked for, each once; several may stand together with commas between them."""
        parts = [part for each in asked for part in ([each] if each in self.classes else each.split(","))]
        if parts and not self.method.labelled:
            raise ConfigError(f"method '{self.method.name}' learns without classes, so none can be asked for")
        return tuple(dict.fromkeys(self.class_of(part.strip()) for part in parts))

    def labels(self, count: int, *, seed: int = 0, shares: Tensor | None = None) -> Tensor:
        """``count`` classes by their number, drawn from ``shares`` or from those of the samples."""
        edges = torch.cumsum(self.label_shares if shares is None else shares, dim=0)
        drawn = Streams(seed).uniform("sample/label", count)
        return torch.searchsorted(edges / edges[-1], drawn).clamp_max(len(self.classes) - 1)

    def _labels(self, group: str, label: str, given: Tensor | None, count: int, seed: int) -> Tensor:
        if given is not None:
            if len(given) != count:
                raise ConfigError(f"{len(given)} labels were given for {count} samples")
            return given
        if not label:
            return self.labels(count, seed=seed, shares=self.label_shares_of(group))
        return torch.full((count,), self.classes.index(self.class_of(label)))

    def _pathway(self, pathway: str, *, swapped: bool, labelled: bool) -> str:
        """The name of a pathway, or of the first one, that can do what is asked of it."""
        name = pathway or next(iter(self.method.pathways), "")
        if not name:
            raise ConfigError(f"method '{self.method.name}' classifies and generates nothing")
        if name not in self.method.pathways:
            raise ConfigError(unknown("pathway", name, self.method.pathways))
        if swapped and not self.method.pathways[name].uses_prior:
            raise ConfigError(f"pathway '{name}' does not draw from a group's prior, so there is none to swap")
        if labelled and not self.method.pathways[name].labelled:
            told = ", ".join(way for way, known in self.method.pathways.items() if known.labelled)
            raise ConfigError(
                f"pathway '{name}' of method '{self.method.name}' is not told a class, so it cannot generate one that "
                f"is asked for (told: {told or 'none'})"
            )
        return name

    @torch.no_grad()
    def sample(
        self,
        count: int,
        *,
        group: str,
        seed: int = 0,
        pathway: str = "",
        prior_of: str = "",
        label: str = "",
        labels: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """``count`` images of a group in [0, 1], shape (count, *shape), on ``device``; a seed gives the same anywhere.

        ``prior_of`` draws the latents from another group's prior, to see what a swapped prior does. Where the pathway
        is told a class, all samples are of the class ``label``, or each is of that in ``labels``, or they are drawn.
        """
        for known in (group, prior_of or group):
            if known not in self.groups:
                raise ConfigError(unknown("group", known, self.groups))
        if count < 1:
            raise ConfigError(f"cannot generate {count} samples: ask for at least 1")
        name = self._pathway(pathway, swapped=bool(prior_of), labelled=bool(label) or labels is not None)
        way, index, streams = self.method.pathways[name], self.groups.index(group), Streams(seed)
        prior = self.groups.index(prior_of or group)
        wanted = self._labels(group, label, labels, count, seed) if way.labelled else torch.full((count,), prior)
        if missing := self.missing(group, name):
            raise ConfigError(f"nothing can be generated for group '{group}': '{missing[0]}' never reached the server")
        device = torch.device(device)
        model = self.model(group).to(device)
        images, chunks, at_once = [], math.ceil(count / CHUNK), AT_ONCE.get(device.type, 1)
        for first in range(0, chunks, at_once):
            steps = torch.arange(first, min(first + at_once, chunks), device=device)
            left = count - first * CHUNK
            rows = min(left, CHUNK * len(steps))
            noise = {
                key: streams.normal(
                    f"sample/{key}", min(CHUNK, left), math.prod(shape), silo=index, step=steps, device=device
                )
                .flatten(0, 1)[:rows]
                .reshape(rows, *shape)
                for key, shape in way.noise.items()
            }
            conditions = wanted[first * CHUNK : first * CHUNK + rows].to(device)
            groups = torch.full((rows,), index, device=device)
            images.append(way.generate(model, SampleInputs(noise, groups, conditions)))
        return torch.cat(images)
