"""Local training of one silo under DP-SGD: the plain loop again, with Poisson batches and noisy sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor, nn

from fedloom.engines.base import Task
from fedloom.engines.batches import crew_of_one, objective_noise
from fedloom.engines.local_state import LocalState
from fedloom.engines.optimizers import LocalOptimizer
from fedloom.engines.poisson_batches import NOISE, PoissonBatches, Sampling, sampling_of
from fedloom.errors import ConfigError
from fedloom.federation.records import UNLABELLED, Batch, Records, Silo, batch_of
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.objectives.base import Step
from fedloom.objectives.lending import Lending, batch_of_columns, columns_of
from fedloom.outline import in_outline
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, total_of
from fedloom.privacy.gradient_forms import Form, Whole
from fedloom.privacy.noise import NoiseKey, Randomness, StreamNoise
from fedloom.privacy.per_example import Watch, layers_suffice, watched_gradients
from fedloom.privacy.sampling import in_eights
from fedloom.privacy.separation import require_same_alone, require_separate_examples
from fedloom.sharing.codec import under
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

log = logging.getLogger(__name__)

TRIED_ROWS = 4
COINS_AT_ONCE = 2**17  # for a window of steps: drawn one by one, a step's coins would mostly be overhead


@dataclass(frozen=True, eq=False)
class Learner:
    """A phase at work: the parameters that it trains, by their names in the model, and their optimiser."""

    phase: Phase
    parameters: Mapping[str, nn.Parameter]
    optimizer: LocalOptimizer  # of a stack of one silo

    def step(self, gradients: Iterable[Tensor]) -> None:
        """Move the parameters, given one gradient for each."""
        self.optimizer.step_alone(gradients)


@dataclass(frozen=True, eq=False)
class _Look:
    """How the records of a step are looked at."""

    __repr__ = in_outline

    learner: Learner
    model: nn.Module
    bound: Tensor
    quick: bool  # by what layers have at hand


def parameters_of(phase: Phase, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a phase trains, by their names in the model."""
    prefixes = tuple(f"{block}." for block in phase.trains)
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}


def learners_of(phases: Sequence[Phase], model: nn.Module, state: LocalState) -> list[Learner]:
    """The phases at work on a model, whose weights are the state's."""
    found = zip(phases, state.optimizers, strict=True)
    return [Learner(phase, parameters_of(phase, model), optimizer) for phase, optimizer in found]


PlainStep = Callable[[Learner, Batch, Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class PrivateTraining:
    """One silo's round under DP-SGD."""

    __repr__ = in_outline

    mechanism: DPSGD
    silo: Silo
    task: Task
    streams: Streams
    randomness: Randomness  # of coins, noise, and what objectives draw for records
    batch_size: int
    bounds: Tensors  # phase -> the clip bound of its next step; the steps move it on in place
    made_up: Records  # a few rows to try phases on
    sealed: bool = False  # that records fail stays inside
    classes: int = 0  # that the method learns; 0: it does not look at labels

    def steps(
        self, count: int, model: nn.Module, learners: list[Learner], received: Tensors, plain_step: PlainStep
    ) -> Iterator[dict[str, Tensor]]:
        """``count`` steps, each with the mean terms of all its phases."""
        private = [learner for learner in learners if learner.phase.touches_records]
        quick = [watched_trial(model, each.phase, each.parameters, self.made_up, self.streams)[1] for each in private]
        device = next(model.parameters()).device  # what is drawn on the host moves there; generators do not
        longest = max(1, COINS_AT_ONCE // max(1, len(private) * self._sampling.units))
        windows = self._batches([learner.phase for learner in learners], count).windows(longest)
        inputs = (window.step(number) for window in windows for number in range(len(window)))
        for step, phases in enumerate(inputs):
            terms: dict[str, Tensor] = {}
            for learner, passes in zip(learners, phases, strict=True):
                own = [{name: tensor[0] for name, tensor in each.items()} for each in passes]
                if learner.phase.touches_records:
                    number = private.index(learner)
                    noise_key = NoiseKey(self.task.silo, self.task.context.round, step * len(private) + number)
                    found = self._private_step(learner, model, received, own, noise_key, quick[number])
                else:
                    noise = {name: tensor.to(device) for name, tensor in under(NOISE, own[0]).items()}
                    found = plain_step(learner, public_batch(self.silo, self.batch_size).to(device), noise)
                terms |= {f"{learner.phase.name}/{name}": value for name, value in found.items()}
            yield terms

    def total(self, model: nn.Module, learner: Learner, received: Tensors) -> Tensors:
        """The clipped gradients of one step, over the expected batch, before any noise."""
        (quick,) = [watched_trial(model, learner.phase, learner.parameters, self.made_up, self.streams)[1]]
        (window,) = self._batches([learner.phase], 1).windows(1)
        ((passes,),) = (window.step(0),)
        own = [{name: tensor[0] for name, tensor in each.items()} for each in passes]
        total, _ = self._totalled(learner, model, received, own, quick)
        return {name: total.gradients[name] for name in learner.parameters}

    def _batches(self, phases: Sequence[Phase], count: int) -> PoissonBatches:
        crew = crew_of_one(phases, self.batch_size, self.task, count, self._sampling.units, self.streams.seed)
        return PoissonBatches(crew, [self._sampling], lambda _: self.randomness, in_eights(self._sampling.rows))

    @cached_property
    def _sampling(self) -> Sampling:
        return sampling_of(self.silo, self.mechanism.unit, self.mechanism.rate)

    def _private_step(
        self,
        learner: Learner,
        model: nn.Module,
        received: Tensors,
        passes: Sequence[Tensors],
        noise_key: NoiseKey,
        quick: bool,
    ) -> dict[str, Tensor]:
        mechanism, bound = self.mechanism, self.bounds[learner.phase.name]
        total, terms = self._totalled(learner, model, received, passes, quick)
        secret = mechanism.draw(learner.parameters, self.randomness, noise_key)
        gradients, following = mechanism.release(total, secret)
        bound.copy_(following)
        learner.step(gradients[name] for name in learner.parameters)
        rows = sum(int(each["mask"].sum()) for each in passes)
        return {name: total / max(rows, 1) for name, total in terms.items()}

    def _totalled(
        self, learner: Learner, model: nn.Module, received: Tensors, passes: Sequence[Tensors], quick: bool
    ) -> tuple[ClippedSum, Tensors]:
        """A step's clipped sum, and the sum of each term."""
        bound = self.bounds[learner.phase.name]
        totals: list[ClippedSum] = []
        terms: Tensors = {}
        for each in passes:
            batch = self._possible(batch_of(self.silo.train, each["index"], each["mask"])).to(bound.device)
            noise = {name: tensor.to(bound.device) for name, tensor in under(NOISE, each).items()}
            total, found = self._clipped(
                _Look(learner, model, bound, quick), Step(batch, noise, received, self.task.context)
            )
            totals.append(total)
            for name, term in found.items():
                terms[name] = terms.get(name, torch.zeros(())) + term
        return total_of(totals), terms

    def _possible(self, batch: Batch) -> Batch:
        """A batch without the rows whose class there is not: they count for nothing, like all that cannot be computed.

        That is found here, on the host: a GPU that looks up such a class fails for good.
        """
        if not (self.sealed and self.classes):
            return batch
        possible = (batch.y >= 0) & (batch.y < self.classes)
        return replace(batch, y=torch.where(possible, batch.y, 0), mask=batch.mask * possible)

    def _clipped(self, look: _Look, step: Step) -> tuple[ClippedSum, Tensors]:
        """The clipped sum of a pass, and the sum of each term; a unit that cannot be computed counts for nothing.

        That something failed would tell whoever chose the weights that such a unit is there, so where this must stay
        inside, the others go on without it.
        """
        try:
            return self._of_rows(look, step)
        except Exception:
            if not self.sealed:
                raise
            log.exception("a batch failed; its records are looked at one by one")
        batch = step.batch
        whose = (
            torch.arange(len(batch.x), device=batch.x.device)
            if self._sampling.subject is None
            else cast("Tensor", batch.subject)
        )
        nothing = {name: torch.zeros_like(parameter) for name, parameter in look.learner.parameters.items()}
        sums, terms = [ClippedSum(nothing, torch.zeros(()), look.bound)], dict[str, Tensor]()
        for unit in torch.unique(whose[batch.mask > 0]):
            rows = torch.nonzero((whose == unit) & (batch.mask > 0)).flatten()
            columns = {name: column[rows] for name, column in columns_of(batch).items()}
            noise = {name: tensor[rows] for name, tensor in step.noise.items()}
            try:
                total, found = self._of_rows(look, replace(step, batch=batch_of_columns(columns), noise=noise))
            except Exception:
                continue
            sums.append(total)
            terms = {name: terms.get(name, torch.zeros(())) + term for name, term in found.items()}
        return total_of(sums), terms

    def _of_rows(self, look: _Look, step: Step) -> tuple[ClippedSum, Tensors]:
        learner, model, batch = look.learner, look.model, step.batch
        with Watch(model, list(learner.parameters)) as watch:
            losses = learner.phase.objective(model, step)
        forms = (
            partial(watched_gradients, losses.total, watch) if look.quick else partial(self._written_out, look, step)
        )
        total = self.mechanism.clipped_sum(
            losses.total, batch.mask, learner.parameters, look.bound, forms, subject=batch.subject
        )
        terms = {"loss": losses.total, **losses.terms}
        return total, {name: (term.detach() * batch.mask).sum() for name, term in terms.items()}

    def _written_out(self, look: _Look, step: Step) -> dict[str, Form]:
        """Where layers do not say it all."""
        weights = {n: p.detach() for n, p in look.learner.parameters.items() if self.mechanism.is_private(n)}
        found = Lending(look.model, look.learner.phase.objective).gradients(weights, {}, step)
        return {name: Whole(rows) for name, rows in found.items()}


def public_batch(silo: Silo, rows: int) -> Batch:
    """Rows for a phase that touches no records: none of them is one, and the silo's groups take turns."""
    groups = torch.tensor(silo.groups)
    return Batch(
        x=torch.zeros(rows, *silo.train.shape),
        y=torch.full((rows,), UNLABELLED),
        group=groups[torch.arange(rows) % len(groups)],
        mask=torch.ones(rows),
    )


def made_up_records(silo: Silo, classes: int, streams: Streams) -> Records:
    """A few rows that could be the silo's and are nobody's: what comes of a trial must not depend on its records."""
    number, real = torch.arange(TRIED_ROWS), silo.train
    uniform = streams.uniform("trial", TRIED_ROWS * math.prod(real.shape)).reshape(TRIED_ROWS, *real.shape)
    return Records(
        x=real.modality.made_up(uniform.to(torch.float32)),
        y=number % classes if classes else torch.full((TRIED_ROWS,), UNLABELLED),
        group=torch.tensor(silo.groups)[number % len(silo.groups)],
        subject=None if real.subject is None else number,
        attributes=None if real.attributes is None else torch.zeros(TRIED_ROWS, *real.attributes.shape[1:]),
        kind=real.kind,
    )


def trial_of(
    model: nn.Module, phase: Phase, made_up: Records, streams: Streams, rows: range = range(TRIED_ROWS)
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A phase's losses as a function of a few examples, and those examples."""
    device, index = next(model.parameters()).device, torch.tensor(rows)
    batch = batch_of(made_up.take(index).to(device), torch.arange(len(rows)))
    noises = objective_noise(StreamNoise(streams), phase, TRIED_ROWS, 0, 0, torch.zeros(1, dtype=torch.int64))
    noise = {name: tensor[0, index].to(device) for name, tensor in noises.items()}
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    step = Step(batch, noise, received, RoundContext(1, 1, ()))
    return lambda x: phase.objective(model, replace(step, batch=replace(batch, x=x))).total, batch.x


def watched_trial(
    model: nn.Module, phase: Phase, parameters: Mapping[str, nn.Parameter], made_up: Records, streams: Streams
) -> tuple[Watch, bool]:
    """A watch that has seen all calls of a phase, and whether it sees all that the phase does with its parameters."""
    losses, x = trial_of(model, phase, made_up, streams)
    with Watch(model, list(parameters)) as watch:
        losses(x)
    return watch, layers_suffice(lambda: losses(x), watch, parameters)


def check_private(model: nn.Module, phase: Phase, made_up: Records, streams: Streams) -> None:
    """Refuse, by name, what DP-SGD cannot bound: mixed examples, and buffers that learn."""
    losses, x = trial_of(model, phase, made_up, streams)
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    losses(x)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ConfigError(
                f"phase '{phase.name}' changes the buffer '{name}' by what it sees, which DP-SGD does not guard; "
                "use layers without running statistics, such as group norm"
            )
    objective, instead = type(phase.objective).__name__, "one that scores each example by itself"
    require_separate_examples(losses, x, objective, instead)
    single = [trial_of(model, phase, made_up, streams, range(row, row + 1)) for row in range(TRIED_ROWS)]
    require_same_alone(losses(x), [own(only) for own, only in single], objective, instead)
