"""Local training of one silo, the plain way: this loop is the truth that faster engines must equal."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.engines.base import Result, SiloState, Task, participants_of, site_of
from fedloom.engines.optimizers import LocalOptimizer, gradients_of_mean
from fedloom.engines.private_training import Learner, PrivateTraining, check_private, made_up_records, objective_noise
from fedloom.errors import FedloomError
from fedloom.federation.records import Batch, Federation, Records, Silo, batch_of
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Phase, fresh_blocks, some_model
from fedloom.objectives.base import Step
from fedloom.privacy.noise import NoiseKey, Randomness, StreamNoise
from fedloom.privacy.payload_sums import Query, SumNoise
from fedloom.privacy.silo_privacy import SiloPrivacy, unit_numbers
from fedloom.sharing.codec import under
from fedloom.sharing.plan import Down, Tensors
from fedloom.sharing.update import Update, pass_egress
from fedloom.streams import Streams

MODEL, OPTIMIZER, BOUND = "model/", "optimizer/", "clip-bound/"
HOST = torch.device("cpu")
PRETRAINING_ROUND = 0  # whose coins and noise no round has


def local_steps(config: Config, records: int) -> int:
    """How many steps a silo takes in a round."""
    if config.local.steps:
        return config.local.steps
    steps = config.local.epochs * math.ceil(records / config.local.batch_size)
    if config.local.updates == "matched":
        return max(1, round(config.participation.rate * steps))
    return steps


@dataclass(frozen=True)
class Trainer:
    """Everything that local training needs; a pure function from task to result, in whatever process it runs."""

    config: Config
    method: Method
    federation: Federation
    privacy: tuple[SiloPrivacy, ...] = ()  # one for each silo under DP-SGD
    secret: Randomness | None = None  # of all that records are drawn and hidden by, where no task brings its own
    sealed: bool = False  # that single records fail must not be seen from outside
    device: torch.device = HOST  # of the steps; what is drawn, sent and kept lies on the CPU

    @cached_property
    def streams(self) -> Streams:
        """The experiment's random streams."""
        return Streams(self.config.seed)

    def randomness(self, secret: Randomness | None, *, trial: bool = False) -> Randomness:
        """What a silo's records are drawn and hidden by in a round: its ``secret``, or the seed where that will do."""
        found = secret or self.secret
        if found is None and not (trial or self.config.privacy.noise == "test"):
            raise FedloomError("a round under DP-SGD was begun without a secret for its noise")
        return found or self.seeded

    @cached_property
    def seeded(self) -> StreamNoise:
        """The randomness of the experiment's seed."""
        return StreamNoise(self.streams)

    @cached_property
    def attended(self) -> list[tuple[int, ...]]:
        """For each silo the rounds that it takes part in, as drawn in public before the run."""
        chosen = {r: participants_of(self.config, self.federation, r) for r in range(1, self.config.rounds + 1)}
        return [tuple(r for r, silos in chosen.items() if i in silos) for i in range(len(self.federation))]

    @cached_property
    def _templates(self) -> dict[Hashable, nn.Module]:
        return {}

    def train(self, task: Task) -> Result:
        """One silo's round: load what came down, train, keep what stays, send what is declared."""
        start = time.perf_counter()
        silo, site = self.federation.silos[task.silo], site_of(self.federation, task.silo)
        plan = self.method.plan
        model = self._model(site)
        model.load_state_dict(self._starting_weights(task, model))
        model.to(self.device)
        received = {name: tensor.to(self.device, copy=True) for name, tensor in task.received.items()}
        learners = [self._learner(phase, model, task.context, task.state) for phase in self.method.phases]
        bounds = {name: bound.to(self.device) for name, bound in _under(BOUND, task.state.tensors).items()}
        self._pretrain(silo, task, model, received, bounds)

        sums: dict[str, Tensor] = {}
        steps = 0
        for terms in self._steps(silo, task, model, learners, received, bounds):
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros(())) + value
            steps += 1

        model.load_state_dict(self.method.settle(_under("", model.state_dict())))
        state = model.cpu().state_dict()
        parts = plan.split(state, site)
        update = Update(
            silo=silo.name,
            round=task.context.round,
            blocks={key: part for key, part in parts.items() if plan.blocks[key.block].up},
            counts=self.counts(task.silo),
            payloads={} if task.step_limit is not None else self.payloads(task.silo, state, task.context, task.secret),
        )
        return Result(
            silo=task.silo,
            update=update,
            egress=pass_egress(update, plan, site, parts),
            state=self._kept(task, model, learners, bounds),
            terms={name: total.item() / steps for name, total in sums.items()},
            steps=steps,
            seconds=time.perf_counter() - start,
        )

    def steps(self, silo: int) -> int:
        """How many steps a silo takes in a round: batches of its records, under DP-SGD of its units."""
        units = self.privacy[silo].units if self.privacy else len(self.federation.silos[silo])
        return local_steps(self.config, units)

    def _model(self, site: Site) -> nn.Module:
        """A model for a site; copied from one of its kind, because drawing weights takes as long as a step."""
        kind = self.method.kind(site)
        if kind not in self._templates:
            self._templates[kind] = some_model(self.method, site)
        return copy.deepcopy(self._templates[kind])

    def _steps(
        self, silo: Silo, task: Task, model: nn.Module, learners: list[Learner], received: Tensors, bounds: Tensors
    ) -> Iterator[dict[str, Tensor]]:
        """The round, step by step: the mean of each term of each phase."""

        def plain_step(learner: Learner, batch: Batch, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return self._step(learner, model, Step(batch, noise, received, task.context))

        if not learners:
            return
        limit = self.steps(task.silo) if task.step_limit is None else task.step_limit
        if task.mechanism is not None:
            private = PrivateTraining(
                task.mechanism,
                silo,
                task,
                self.streams,
                self.randomness(task.secret, trial=task.step_limit is not None),
                self.config.local.batch_size,
                bounds,
                self.made_up(task.silo),
                self.sealed,
                len(self.federation.classes) if self.method.labelled else 0,
            )
            yield from private.steps(limit, model, learners, received, plain_step)
            return
        for batch, noises in itertools.islice(self._batches(silo, task), limit):
            terms: dict[str, Tensor] = {}
            for learner, noise in zip(learners, noises, strict=True):
                found = plain_step(learner, batch, noise)
                terms |= {f"{learner.phase.name}/{term}": value for term, value in found.items()}
            yield terms

    def _pretrain(self, silo: Silo, task: Task, model: nn.Module, received: Tensors, bounds: Tensors) -> None:
        """In a silo's first round, before its other steps: private ones on what nothing comes down for."""
        if task.step_limit is not None or not self.privacy or not self.privacy[task.silo].pretrains(task.context.round):
            return
        before = replace(
            task,
            context=replace(task.context, round=PRETRAINING_ROUND),
            mechanism=self.privacy[task.silo].pretraining_mechanism,
            step_limit=self.config.privacy.pretraining,
        )
        learners = [
            self._learner(phase, model, before.context, SiloState()) for phase in pretraining_phases(self.method)
        ]
        for _ in self._steps(silo, before, model, learners, received, bounds):
            pass

    def _step(self, learner: Learner, model: nn.Module, step: Step) -> dict[str, Tensor]:
        """One optimiser step of one phase; returns the mean of each term over the batch."""
        phase = learner.phase
        losses = phase.objective(model, step)
        learner.step(gradients_of_mean(losses.total, step.batch.mask, list(learner.parameters.values())))
        rows = step.batch.mask.sum()
        terms = {"loss": losses.total, **losses.terms}
        return {name: (term.detach() * step.batch.mask).sum() / rows for name, term in terms.items()}

    def _batches(self, silo: Silo, task: Task) -> Iterator[tuple[Batch, list[dict[str, Tensor]]]]:
        """Batches without end, with the noise of each phase; both are functions of (silo, round, step) alone."""
        size, count = self.config.local.batch_size, len(silo)
        per_epoch = math.ceil(count / size)
        for epoch in itertools.count():
            order = self.streams.permutation("batches", count, silo=task.silo, round=task.context.round, step=epoch)
            steps = torch.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
            noise = [
                objective_noise(self.seeded, phase, min(size, count), task.silo, task.context.round, steps)
                for phase in self.method.phases
            ]
            for i in range(per_epoch):
                index = order[i * size : (i + 1) * size]
                rows = len(index)
                yield (
                    batch_of(silo.train, index).to(self.device),
                    [{name: tensor[i, :rows].to(self.device) for name, tensor in phase.items()} for phase in noise],
                )

    def _starting_weights(self, task: Task, model: nn.Module) -> Tensors:
        """What came down, else what the silo kept, else (first round of a private block) fresh weights."""
        weights = dict(task.received)
        kept = under(MODEL, task.state.tensors)
        weights.update(kept)
        if set(weights) < set(model.state_dict()):
            site = site_of(self.federation, task.silo)
            fresh = self.method.plan.join(fresh_blocks(self.method, site, self.streams), site)
            weights = {**fresh, **weights}
        return weights

    def _learner(self, phase: Phase, model: nn.Module, context: RoundContext, state: SiloState) -> Learner:
        """A phase with its optimiser, and its old moments where the phase keeps them."""
        named = parameters_of(phase, model)
        optimizer = LocalOptimizer(phase.optimizer, {n: p.detach().unsqueeze(0) for n, p in named.items()})
        optimizer.begin(context)
        if moments := _under(f"{OPTIMIZER}{phase.name}/", state.tensors):
            optimizer.load(0, moments)
        return Learner(phase, named, optimizer)

    def _kept(self, task: Task, model: nn.Module, learners: list[Learner], bounds: Tensors) -> SiloState:
        """What stays at the silo until its next round."""
        private = tuple(f"{b}." for b, rule in self.method.plan.blocks.items() if rule.down is Down.NOTHING)
        tensors = {MODEL + n: t.clone() for n, t in model.state_dict().items() if private and n.startswith(private)}
        for learner in learners:
            if learner.phase.optimizer.keep:
                moments = learner.optimizer.kept(1)
                tensors |= {f"{OPTIMIZER}{learner.phase.name}/{name}": t[0].clone() for name, t in moments.items()}
        if task.mechanism is not None and task.mechanism.clipping.share:  # a bound that is searched for
            tensors |= {BOUND + name: bound.cpu() for name, bound in bounds.items()}
        return SiloState(tensors)

    def check_privacy(self) -> None:
        """Refuse what DP-SGD cannot guard, before anything is trained."""
        silos = range(len(self.federation)) if self.privacy else ()
        for index in {self.method.kind(site_of(self.federation, i)): i for i in silos}.values():
            made_up, model = self.made_up(index), self._model(site_of(self.federation, index))
            for phase in self.method.phases:
                if phase.touches_records:
                    check_private(model, phase, made_up, self.streams)

            for rule in self.method.payloads:
                rule.statistic.check(made_up, model)

    def made_up(self, silo: int) -> Records:
        """A few rows like those of a silo, to try things on."""
        return made_up_records(self.federation.silos[silo], len(self.federation.classes), self.streams)

    def payloads(
        self, silo: int, weights: Mapping[str, Tensor], context: RoundContext, secret: Randomness | None
    ) -> dict[str, Tensors]:
        """What a silo sends beside its blocks in a round, given its model's weights after training.

        Under a mechanism it must have been charged before this is called.
        """
        due = [rule for rule in self.method.payloads if context.round in rule.rounds(self.attended[silo])]
        if not due:
            return {}
        owner, model = self.federation.silos[silo], self._model(site_of(self.federation, silo))
        model.load_state_dict(weights)
        found: dict[str, Tensors] = {}
        for rule in due:
            noise, noise_key = None, NoiseKey(silo, context.round, 0, rule.name)
            if self.privacy and not rule.statistic.problem:
                privacy = self.privacy[silo]
                unit = unit_numbers(owner, privacy.settings.unit)
                multiplier = privacy.trust.share * privacy.payload_noise[rule.name]
                shapes = rule.payload.shapes if self.sealed else None
                noise = SumNoise(multiplier, unit, self.randomness(secret), shapes)
            found[rule.name] = rule.statistic.value(Query(owner.train, model, self.streams, noise_key, noise))
        return found

    def counts(self, silo: int) -> dict[str, float]:
        """How many records, or subjects where they are protected, are behind a silo's copies: in all and per group.

        A subject with records of several groups counts in each of them.
        """
        owner = self.federation.silos[silo]
        subject = unit_numbers(owner, self.privacy[silo].settings.unit) if self.privacy else None

        def units(rows: Tensor) -> float:
            return float(rows.sum() if subject is None else len(torch.unique(subject[rows])))

        return {
            "all": units(torch.ones(len(owner), dtype=torch.bool)),
            **{f"group={self.federation.groups[g]}": units(owner.train.group == g) for g in owner.groups},
        }


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """Copies of what lies under a prefix."""
    return {name: tensor.clone() for name, tensor in under(prefix, tensors).items()}


def pretraining_phases(method: Method) -> list[Phase]:
    """The phases as far as they train what is a silo's own: whatever comes down would overwrite the rest."""
    own = {block for block, rule in method.plan.blocks.items() if rule.down is Down.NOTHING}
    found = [replace(phase, trains=tuple(b for b in phase.trains if b in own)) for phase in method.phases]
    return [phase for phase in found if phase.trains]


def parameters_of(phase: Phase, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a phase trains, by their names in the model."""
    prefixes = tuple(f"{block}." for block in phase.trains)
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}
