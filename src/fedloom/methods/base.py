"""The one idea: a method is model blocks x local step x sharing plan x server step; any runs under any privacy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fedloom.methods
from fedloom.config import Config, LocalConfig, ModelConfig
from fedloom.errors import ConfigError, unknown
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.steps import ServerStep
from fedloom.modalities.base import MODALITIES, Modality, modality_of
from fedloom.modalities.likelihoods import Likelihood
from fedloom.models.networks import Routed
from fedloom.objectives.base import Objective
from fedloom.outline import in_outline
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.payload_sums import Statistic
from fedloom.registry import Registry, values_in
from fedloom.settings import parse
from fedloom.sharing.aggregation import Aggregator
from fedloom.sharing.plan import BlockKey, Payload, Scope, Seen, SharingPlan, Tensors
from fedloom.streams import Streams


@dataclass(frozen=True)
class OptimizerRule:
    """How a phase's parameters move."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    keep: bool = False  # whether its state survives from round to round
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0  # of a step's gradient, over all parameters of the phase; 0: no bound
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0  # rounds

    @classmethod
    def of(cls, local: LocalConfig) -> OptimizerRule:
        """As the configuration's ``local`` section says."""
        if local.momentum and local.optimizer != "sgd":
            raise ConfigError(f"local.momentum = {local.momentum:g} needs local.optimizer = 'sgd'")
        if local.weight_decay and local.optimizer == "adam":
            raise ConfigError(f"local.weight_decay = {local.weight_decay:g} needs local.optimizer = 'adamw' or 'sgd'")
        return cls(
            local.optimizer,
            local.learning_rate,
            keep=local.keep_optimizer,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
            schedule=local.schedule,
            warmup=local.warmup,
        )

    @property
    def scheduled(self) -> bool:
        """Whether its rate is another in some rounds."""
        return self.schedule != "constant" or self.warmup > 0

    def rate(self, context: RoundContext) -> float:
        """The learning rate of a round, by the round's public number alone: whoever resumes has the same."""
        number = max(context.round, 1)  # whatever comes before the first round goes at its rate
        if number <= self.warmup:
            return self.learning_rate * number / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        past = (number - 1 - self.warmup) / (context.rounds - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * past)) / 2


@dataclass(frozen=True)
class Phase:
    """One part of the local step: which blocks it trains, on what objective, with which optimiser."""

    name: str
    trains: tuple[str, ...]
    objective: Objective
    optimizer: OptimizerRule
    touches_records: bool = True  # only such phases need a privacy mechanism
    at_once: int = 0  # records of a batch that one silo's memory has room for, where it trains by itself; 0: all
    first: int = 1  # round in which it trains
    last: int = 0  # 0: none is

    def trains_in(self, context: RoundContext) -> bool:
        """Whether a round is one of its own: by the round's public number alone, so all silos agree."""
        number = max(context.round, 1)  # whatever comes before the first round is part of it
        return self.first <= number and (not self.last or number <= self.last)


@dataclass(frozen=True)
class PayloadRule:
    """A payload that a silo computes from its own records, after the round's training, and sends beside its blocks.

    The sharing plan must declare the payload, with the shapes of its tensors; the server step finds it in the update.
    """

    payload: Payload
    statistic: Statistic
    # Of the rounds that the silo takes part in; "before": before any of them, without blocks beside it.
    when: Literal["before", "first", "every", "last"] | slice = "first"
    share: float = 0.1  # of the privacy budget, unless ``privacy.shares`` says otherwise

    @property
    def name(self) -> str:
        """The name of its payload, under which the server finds it and ``privacy.shares`` speaks of it."""
        return self.payload.name

    def rounds(self, attended: tuple[int, ...]) -> tuple[int, ...]:
        """Those rounds, of the ones that a silo takes part in, in which it is sent."""
        if self.when == "before":
            return (BEFORE,)
        named = {"first": slice(1), "every": slice(None), "last": slice(-1, None)}
        return attended[self.when if isinstance(self.when, slice) else named[self.when]]


@dataclass(frozen=True)
class SampleInputs:
    """What samples are made of, one row for each."""

    __repr__ = in_outline

    noise: Mapping[str, Tensor]
    group: Tensor
    condition: Tensor  # the label where the pathway is labelled, else the group whose prior is drawn from


@dataclass(frozen=True)
class Pathway:
    """One way to generate: standard normal noise per sample, and the function that makes samples of it."""

    noise: Mapping[str, tuple[int, ...]]
    generate: Callable[[nn.Module, SampleInputs], Tensor]
    summary: str
    blocks: tuple[str, ...]  # what the function uses of the model; all of it must have reached the server
    uses_prior: bool = False  # whether another group's prior would change what comes out
    labelled: bool = False  # whether it is told which class to generate


def groups_of(site: Site) -> Hashable:
    """Sites of equal groups have equal models, where a method says nothing else."""
    return site.groups


def unchanged(weights: Tensors) -> Tensors:
    """What most methods do to a silo's weights when its round is over."""
    return weights


_DRAWING = threading.RLock()  # new weights come from torch's global generator, which all threads share


@dataclass(frozen=True)
class Method:
    """All that an engine needs to know."""

    name: str
    plan: SharingPlan
    build: Callable[[Site], nn.Module]  # the model that a site trains or generates with
    phases: tuple[Phase, ...]  # none: silos train nothing
    server_step: ServerStep
    pathways: Mapping[str, Pathway]  # ways to generate; the first is the default
    payloads: tuple[PayloadRule, ...] = ()  # what leaves a silo beside its blocks
    aggregator: Aggregator = field(default_factory=Aggregator)  # what the server step is shown of updates
    learns_labels: bool = False  # though it may generate none
    own_posterior: bool = False  # its phases follow model.posterior already
    label_exponent: float = 1.0  # on the label shares of samples
    kind: Callable[[Site], Hashable] = groups_of  # equal for sites whose models are built alike
    settle: Callable[[Tensors], Tensors] = unchanged  # what becomes of a silo's weights after a round's last step
    server_plan: SharingPlan | None = None  # of the server's own model, where it generates with one
    averaging: float = 0.0  # how much the past counts in the running mean of weights that is sampled; 0: the newest

    def __post_init__(self) -> None:
        hidden = next((block for block, rule in self.plan.blocks.items() if rule.seen is Seen.SUM), "")
        seen = f"of block '{hidden}' the server sees the sum over the silos alone"
        if hidden and self.aggregator.merge.needs is Seen.EACH:
            merge = self.aggregator.merge.name
            raise ConfigError(f"server.merge = '{merge}' looks at what every silo sent, but {seen}; use 'mean'")
        if hidden and self.server_step.needs_each:
            raise ConfigError(f"the server step of method '{self.name}' looks at what every silo sent, but {seen}")

    @property
    def labelled(self) -> bool:
        """Whether it learns from labels."""
        return self.learns_labels or any(pathway.labelled for pathway in self.pathways.values())

    @property
    def generating(self) -> SharingPlan:
        """Under which names the server holds the model that it generates with."""
        return self.server_plan or self.plan


def some_model(method: Method, site: Site) -> nn.Module:
    """A model with whatever weights, built without disturbing weights that another thread is drawing."""
    with _DRAWING:
        return method.build(site)


def fresh_blocks(method: Method, site: Site, streams: Streams) -> dict[BlockKey, Tensors]:
    """Initial weights of a site's blocks; a copy's weights depend on its block and owner alone."""
    parts: dict[BlockKey, Tensors] = {}
    for block in method.plan.blocks:
        for key in method.plan.prefixes(block, site).values():
            with _DRAWING, torch.random.fork_rng(devices=[]):
                torch.manual_seed(streams.torch_seed(f"init/{key}"))
                state = method.build(site).state_dict()
            parts[key] = {name: tensor.clone() for name, tensor in method.plan.split(state, site)[key].items()}
    return parts


# What may differ from silo to silo.
ARCHITECTURE = ("network", "hidden", "channels", "latent", "likelihood", "lipschitz")


@dataclass(frozen=True)
class Setting:
    """What a recipe is given: the configuration and the public facts about the federation, never its records."""

    config: Config
    shape: tuple[int, ...]
    groups: tuple[str, ...]
    classes: tuple[str, ...]
    silos: tuple[str, ...] = ()  # their names; unknown where a run is only sampled
    kind: str = ""  # the name of the records' modality; "": that which their shape speaks for

    def __post_init__(self) -> None:
        for silo in self.config.model.silos:
            if self.silos and silo not in self.silos:
                raise ConfigError("model.silos: " + unknown("silo", silo, self.silos))
        for silo in ("", *self.config.model.silos):
            self.likelihood_at(silo)

    @classmethod
    def of(cls, config: Config, federation: Federation) -> Setting:
        """A configuration and the public facts of a federation."""
        names = () if federation.on_demand else tuple(silo.name for silo in federation.silos)
        return cls(config, federation.shape, federation.groups, federation.classes, names, federation.modality.name)

    @property
    def modality(self) -> Modality:
        """What the records are."""
        return modality_of(self.kind, self.shape)

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape of a record as models see it."""
        return self.modality.seen(self.shape)

    @property
    def streams(self) -> Streams:
        """The experiment's random streams."""
        return Streams(self.config.seed)

    def model_at(self, silo: str) -> ModelConfig:
        """The settings of a silo's networks."""
        model = self.config.model
        found = model.changed(model.silos.get(silo, {}), f"model.silos.{silo}", ARCHITECTURE)
        usual = {"network": self.modality.network, "likelihood": next(iter(self.modality.likelihoods))}
        return found.changed({k: name for k, name in usual.items() if getattr(found, k) == "auto"}, "", ARCHITECTURE)

    def likelihood_at(self, silo: str) -> Likelihood:
        """p(x | z) of a silo's networks."""
        model, field = self.model_at(silo), f"model.silos.{silo}.likelihood" if silo else "model.likelihood"
        found = self.modality.likelihood(model.likelihood, model.variance, field)
        if model.lipschitz and not math.isfinite(found.steepness):
            raise ConfigError(
                f"model.lipschitz bounds nothing with {field} = '{model.likelihood}', a mean of any slope"
            )
        return found

    @property
    def widest_latent(self) -> int:
        """The largest latent size of any silo."""
        return max(self.config.model.latent, *(self.model_at(silo).latent for silo in self.config.model.silos), 0)

    def kind_of(self, site: Site) -> Hashable:
        """What tells models of different sites apart: their groups, and the silo where it has networks of its own."""
        return site.groups, site.name if site.name in self.config.model.silos else ""


def branched(plan: SharingPlan, block: str, site: Site, make: Callable[[int], nn.Module]) -> nn.Module:
    """A block for a site: one branch for each of its groups if the block is per group, else a single network.

    ``make`` builds the network of a group by its number, so that groups may differ in architecture.
    """
    if plan.blocks[block].scope is Scope.GROUP and len(site.groups) > 1:
        return Routed({group: make(group) for group in site.groups})
    return make(site.groups[0])


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of methods that have none beside their name."""


@dataclass(frozen=True)
class Recipe:
    """A method by name: its own options, and how they make a :class:`Method` in a setting."""

    name: str
    summary: str
    options: type
    make: Callable[[Setting, Any], Method]
    modalities: tuple[str, ...] = ()  # of the records that it can learn; empty: all

    def check(self, setting: Setting) -> None:
        """Complain about records that it cannot learn."""
        if self.modalities and not {setting.modality.family, setting.modality.learned_as} & set(self.modalities):
            known = [MODALITIES[name] for name in self.modalities]
            wanted = " or ".join(modality.plural for modality in known)
            hint = "".join(f"; see '{modality.made_by}'" for modality in known if modality.made_by)
            raise ConfigError(
                f"method '{self.name}' needs {wanted}, but the records have shape {setting.shape} and are "
                f"{setting.modality.plural}{hint}"
            )


METHODS: Registry[Recipe] = Registry("method", "fedloom.methods", Recipe, lambda: values_in(fedloom.methods, "RECIPE"))


def make_method(setting: Setting) -> Method:
    """The method that the configuration asks for; its options are checked here."""
    from fedloom.methods.discovery import with_discovery  # these are built on this module
    from fedloom.methods.fidelity import with_fidelity
    from fedloom.methods.penalties import with_penalty
    from fedloom.methods.posteriors import with_posterior
    from fedloom.methods.server_steps import with_aggregator, with_compression, with_server_step

    config = setting.config
    if config.local.warmup > config.rounds:
        raise ConfigError(f"local.warmup = {config.local.warmup} must be at most rounds = {config.rounds}")
    recipe, options = METHODS.get(config.method.name, "method.name"), config.method.options
    recipe.check(setting)
    made = recipe.make(setting, parse(recipe.options, options, "method", beside=("name",)))
    trained = with_penalty(with_posterior(made, setting), setting)
    whole = with_server_step(with_aggregator(trained, config), setting)
    made = replace(with_fidelity(whole, setting), averaging=config.server.averaging)
    return with_discovery(with_compression(made, config), config)
