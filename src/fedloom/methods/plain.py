"""A method of plain modules and two functions: what a silo minimises, and how samples are made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError, unknown
from fedloom.federation.rounds import Site
from fedloom.methods.base import (
    METHODS,
    Method,
    NoOptions,
    OptimizerRule,
    Pathway,
    Phase,
    Recipe,
    SampleInputs,
    Setting,
)
from fedloom.methods.steps import Merged
from fedloom.objectives.base import Losses, Step
from fedloom.outline import in_outline
from fedloom.sharing.plan import GLOBAL, GROUP, SILO, UPLOAD, Scope, SharingPlan

NOISE = "z"
SHARED = {"global": GLOBAL, "group": GROUP, "silo": SILO, "upload": UPLOAD}


class Blocks(nn.Module):
    """Modules by name, as attributes."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, copy.deepcopy(block))
        for layer in self.modules():
            if callable(draw := getattr(layer, "reset_parameters", None)):
                draw()


@dataclass(frozen=True)
class PlainMethod:
    """Blocks, a loss and a generator.

    ``loss(blocks, x, z)`` gives one value for each example ``x``; ``generate(blocks, z)`` makes samples. ``z`` is
    standard normal noise, ``latent`` numbers for each. ``share`` says which blocks are ``"global"`` (all of them unless
    told), which are each ``"group"``'s own, which stay at each ``"silo"``, and which are for ``"upload"`` alone::

        fedloom.PlainMethod(
            {"encoder": encoder, "decoder": decoder}, loss, generate, latent=8, share={"encoder": "silo"}
        ).named("mine")
        run = fedloom.train(fedloom.load_config("demo", changes={"method": {"name": "mine"}}), "runs/mine")
    """

    __repr__ = in_outline

    blocks: Mapping[str, nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    generate: Callable[[nn.Module, Tensor], Tensor]
    latent: int
    share: Mapping[str, str] | None = None

    def named(self, name: str) -> PlainMethod:
        """The same, known as ``method.name = name`` from now on; whoever loads the run later names it again."""
        for block, scope in (self.share or {}).items():
            if block not in self.blocks:
                raise ConfigError("share: " + unknown("block", block, self.blocks))
            if scope not in SHARED:
                raise ConfigError(f"share of '{block}': " + unknown("scope", scope, SHARED))
        METHODS.own[name] = Recipe(name, "a method of one's own", NoOptions, lambda setting, _: self._at(name, setting))
        return self

    def _at(self, name: str, setting: Setting) -> Method:
        rules = {block: SHARED[(self.share or {}).get(block, "global")] for block in self.blocks}
        plan = SharingPlan(rules, setting.groups).with_scopes(setting.config.sharing.scopes)
        objective = PlainLoss(self.loss, self.latent)
        return Method(
            name=name,
            plan=plan,
            build=partial(self._model, plan),
            phases=(Phase("plain", tuple(self.blocks), objective, OptimizerRule.of(setting.config.local)),),
            server_step=Merged(),
            pathways={NOISE: Pathway({NOISE: (self.latent,)}, self._samples, "z ~ N(0, I) -> x", self._used())},
        )

    def _used(self) -> tuple[str, ...]:
        """The blocks that samples are made with: those that a sample's gradient reaches."""
        model = Blocks(self.blocks).eval()
        try:
            made = self.generate(model, torch.ones(1, self.latent)).sum()
            named = dict(model.named_parameters())
            slopes = torch.autograd.grad(made, list(named.values()), allow_unused=True)
        except (RuntimeError, ValueError, AttributeError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"generate(blocks, z) fails for z of shape (1, {self.latent}): {first}") from error
        reached = {name.partition(".")[0] for name, slope in zip(named, slopes, strict=True) if slope is not None}
        return tuple(block for block in self.blocks if block in reached)

    def _model(self, plan: SharingPlan, site: Site) -> Blocks:
        owned = [block for block, rule in plan.blocks.items() if rule.scope is Scope.GROUP]
        if owned and len(site.groups) > 1:  # its loss is told nothing of groups, so it could not choose among networks
            raise ConfigError(
                f"'{site.name}' holds {len(site.groups)} groups, and block '{owned[0]}' is one group's; "
                "give every silo one group, or share the block by 'global' or 'silo'"
            )
        return Blocks(self.blocks)

    def _samples(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        return self.generate(model, inputs.noise[NOISE])


@dataclass(frozen=True)
class PlainLoss:
    """A loss that a person wrote, checked for its one rule."""

    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    latent: int

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One draw for each example."""
        return {NOISE: (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """One value for each example."""
        found = self.loss(model, step.batch.x, step.noise[NOISE])
        if not isinstance(found, torch.Tensor) or found.shape != step.batch.x.shape[:1]:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"the loss gives {shape} for {len(step.batch.x)} examples; give one value for each, and no mean of them"
            )
        return Losses(found, {})
