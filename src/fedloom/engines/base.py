"""What every engine shares: the state of a federation, the start of a round at a silo, and its end at the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.federation.participation import participants
from fedloom.federation.records import Federation, Silo
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Phase, fresh_blocks
from fedloom.methods.steps import DistillationJob, Distilled, ServerRound, ServerState, Stepped
from fedloom.outline import in_outline
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.grids import Grid
from fedloom.privacy.ledger import UPDATE
from fedloom.privacy.noise import Randomness, StreamNoise
from fedloom.sharing.plan import BlockKey, Down, SharingPlan, Tensors
from fedloom.sharing.update import EgressRecord, Update, check_update, shapes_of
from fedloom.streams import Streams

if TYPE_CHECKING:
    from fedloom.engines.training import Trainer

Secrets = Mapping[int, StreamNoise]  # under a mechanism: what hides the records of each silo in this round
NO_SECRETS: Secrets = MappingProxyType({})


@dataclass(eq=False)
class SiloState:
    """What a silo keeps from round to round: blocks that are not sent down to it, optimiser states, memories."""

    __repr__ = in_outline

    source: Mapping[str, Tensor] = field(default_factory=dict)  # in memory, until there is too much: then on disk

    def __bool__(self) -> bool:
        return len(self.source) > 0

    @property
    def tensors(self) -> Tensors:
        """All of it by name, read anew where it lies on disk."""
        return dict(self.source.items())


@dataclass(frozen=True)
class FederationState:
    """Everything that changes in a run; with the configuration and the data it determines all that follows."""

    __repr__ = in_outline

    round: int  # rounds done
    server: ServerState
    silos: Mapping[int, SiloState]  # only silos that have something to keep


@dataclass(frozen=True)
class SharedStep:
    """A step that is taken with the sum of all silos' gradients, to each of which every silo adds a share of noise."""

    grid: Grid
    shapes: Mapping[str, tuple[int, ...]]  # "block@owner:tensor": those of every group, as they are summed


@dataclass(frozen=True)
class Task:
    """One silo's work in one round."""

    __repr__ = in_outline

    silo: int
    context: RoundContext
    received: Tensors  # parameter name in the silo's model -> value sent down
    state: SiloState
    step_limit: int | None = None  # instead of the configured number; nothing then goes beside the blocks
    mechanism: DPSGD | None = None  # None: no privacy
    secret: Randomness | None = None  # of all that records are drawn and hidden by in this round
    step: SharedStep | None = None  # given: it is not taken here; its gradients leave, with a share of the noise


@dataclass(frozen=True)
class Result:
    """What came of a task: the update that left the silo, and what stays at home."""

    __repr__ = in_outline

    silo: int
    update: Update  # its blocks are missing where an engine has merged them already
    egress: EgressRecord
    state: SiloState
    terms: Mapping[str, float]  # mean of each loss term over the round; stays at the silo (simulation shows it)
    steps: int
    seconds: float


def result_of_gradients(task: Task, update: Update, egress: EgressRecord, gradients: Tensors, seconds: float) -> Result:
    """What comes of a task whose step is taken elsewhere: gradients as one more payload, and nothing to keep."""
    sent = replace(update, payloads={**update.payloads, UPDATE: gradients})
    size = egress.bytes + sum(tensor.nbytes for tensor in gradients.values())
    left = replace(egress, payloads={**egress.payloads, UPDATE: shapes_of(gradients)}, bytes=size)
    return Result(task.silo, sent, left, SiloState(), {}, 1, seconds)


@dataclass(frozen=True)
class RoundReport:
    """One round as the run folder and the progress line see it."""

    context: RoundContext
    egress: tuple[EgressRecord, ...]
    terms: Mapping[str, float]
    steps: int


@dataclass(frozen=True)
class Job:
    """One round of one run, to be carried out by an engine."""

    state: FederationState
    context: RoundContext
    on_silo: Callable[[Result], None]  # hears of each silo as it finishes
    secrets: Secrets = field(default_factory=dict)


Outcome = tuple[FederationState, RoundReport] | Exception


class Engine(Protocol):
    """Carries out rounds; what is learned does not depend on which engine does it."""

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """Carry out one whole round of a run: send, train, merge, and the server's step."""
        ...

    def describe(self) -> str:
        """The engine's choices in a few words."""
        ...

    def choice(self) -> dict[str, Any]:
        """The engine's choices as plain values: a run that is resumed makes the same."""
        ...

    def close(self) -> None:
        """Give back workers and memory."""
        ...


@runtime_checkable
class AskingEngine(Engine, Protocol):
    """An engine whose silos are elsewhere: what they release before the first round has to be asked for."""

    def before(self, state: FederationState) -> list[Result]:
        """What all silos release, in their order."""
        ...

    def regrouped(self, trainer: Trainer) -> Engine:
        """The same silos, in the groups that were found."""
        ...


def site_of(federation: Federation, silo: int) -> Site:
    """A silo as the models and the sharing plan see it."""
    return Site(federation.silos[silo].name, federation.silos[silo].groups)


def counts_of(silo: Silo, groups: Sequence[str], subject: Tensor | None) -> dict[str, float]:
    """How many records, or subjects where they are given, a silo has: in all and per group.

    A subject with records of several groups counts in each of them.
    """

    def units(rows: Tensor) -> float:
        return float(rows.sum() if subject is None else len(torch.unique(subject[rows])))

    of_group = {f"group={groups[group]}": units(silo.train.group == group) for group in silo.groups}
    return {"all": units(torch.ones(len(silo), dtype=torch.bool)), **of_group}


def participants_of(config: Config, federation: Federation, round: int) -> tuple[int, ...]:
    """Who takes part in a round: a public draw; the one silo of the centralised layout always does."""
    if config.data.layout == "centralised":
        return (0,)
    return participants(config.participation, len(federation), round, Streams(config.seed))


def attendance_of(config: Config, federation: Federation) -> list[tuple[int, ...]]:
    """For each silo the rounds that it takes part in."""
    found: dict[int, list[int]] = {}
    for number in range(1, config.rounds + 1):
        for silo in participants_of(config, federation, number):
            found.setdefault(silo, []).append(number)
    return [tuple(found.get(silo, ())) for silo in range(len(federation))]


def initial_state(method: Method, federation: Federation, config: Config) -> FederationState:
    """Before round 1: the server holds a copy of every block that is merged, and whatever its step brings."""
    streams = Streams(config.seed)
    own = method.server_step.initial(streams)
    merged: dict[BlockKey, Tensors] = {}
    for numbers in federation.alike.values():  # they share all their merged copies: the first stands for the rest
        fresh = fresh_blocks(method, site_of(federation, numbers[0]), streams)
        merged.update({key: part for key, part in fresh.items() if method.plan.blocks[key.block].down is Down.MERGED})
    return FederationState(0, ServerState({**merged, **own.blocks}, own.memory), {})


def check_merge(method: Method, federation: Federation) -> None:
    """Refuse a way to merge that takes more copies of a block than there are silos that have it."""
    plan, merge = method.plan, method.aggregator.merge
    copies: Counter[BlockKey] = Counter()
    for numbers in federation.alike.values():
        site = site_of(federation, numbers[0])
        for block in plan.merged:
            copies.update(dict.fromkeys(plan.prefixes(block, site).values(), len(numbers)))
    for key, count in copies.items():
        if count < merge.least:
            raise ConfigError(f"{merge.title} needs {merge.least} silos for block '{key}', which has {count}")


def received_by(plan: SharingPlan, server: ServerState, site: Site) -> Tensors:
    """What a site is sent at the start of a round, by parameter name in its model."""
    return plan.join(sent_down(plan, server, site), site)


def sent_down(plan: SharingPlan, server: ServerState, site: Site) -> dict[BlockKey, Tensors]:
    """What a site is sent at the start of a round."""
    parts: dict[BlockKey, Tensors] = {}
    for block, rule in plan.blocks.items():
        for key in plan.prefixes(block, site).values():
            source = {Down.MERGED: key, Down.SERVER: BlockKey(block, "server")}.get(rule.down)
            if source is not None:
                parts[key] = server.blocks[source]
    return parts


def pretraining_phases(method: Method) -> list[Phase]:
    """The phases as far as they train what is a silo's own: whatever comes down would overwrite the rest."""
    own = {block for block, rule in method.plan.blocks.items() if rule.down is Down.NOTHING}
    found = [replace(phase, trains=tuple(b for b in phase.trains if b in own)) for phase in method.phases]
    return [phase for phase in found if phase.trains]


class DistillationTrainer(Protocol):
    """How an engine carries out what a distilling server has to learn."""

    @property
    def device(self) -> torch.device:
        """Where distillations are prepared and learned."""
        ...

    def distil(self, distillation: DistillationJob) -> Distilled:
        """Local training of one more site."""
        ...


def conclude(
    method: Method,
    state: FederationState,
    context: RoundContext,
    results: list[Result],
    streams: Streams,
    distiller: DistillationTrainer | None = None,
) -> tuple[FederationState, RoundReport]:
    """The server's half of a round: its step, its distillation where there is one, and what the silos keep."""
    device = torch.device("cpu") if distiller is None else distiller.device
    found = stepped(method, state, context, results, streams, device)
    return finished(method, state, context, results, found, distiller)


def finished(
    method: Method,
    state: FederationState,
    context: RoundContext,
    results: list[Result],
    found: Stepped,
    distiller: DistillationTrainer | None = None,
) -> tuple[FederationState, RoundReport]:
    """The end of a round after the server's step: its distillation where there is one, and what the silos keep."""
    distilled = None
    if found.distillation is not None:
        assert distiller is not None, "a server that learns needs somewhere to do so"
        distilled = distiller.distil(found.distillation)
    return settled(method, state, context, results, found, distilled)


def stepped(
    method: Method,
    state: FederationState,
    context: RoundContext,
    results: list[Result],
    streams: Streams,
    device: torch.device,
    merged: Mapping[BlockKey, Tensors] = MappingProxyType({}),
) -> Stepped:
    """Check every update and run the server step; ``merged`` are copies that an engine has merged already."""
    updates = [result.update for result in sorted(results, key=lambda result: result.silo)]
    for update in updates:
        check_update(update, state.server.blocks)
    if not updates:
        return Stepped(state.server)
    step, known = method.server_step, state.server.blocks
    seen = method.aggregator.delivered(updates, method.plan, known, each=step.needs_each)
    merged = {**merged, **seen.merged}
    return step(ServerRound(state.server, state.server, merged, seen.updates, context, streams, device))


def settled(
    method: Method,
    state: FederationState,
    context: RoundContext,
    results: list[Result],
    found: Stepped,
    distilled: Distilled | None,
) -> tuple[FederationState, RoundReport]:
    """The end of a round: the server with what it was distilled, what the silos keep, and the report."""
    server = found.state if distilled is None else method.server_step.learned(found.state, distilled)
    reported = {**({} if distilled is None else distilled.terms), **found.terms}
    results = sorted(results, key=lambda result: result.silo)
    silos = dict(state.silos)
    silos.update({result.silo: result.state for result in results if result.state})
    steps = sum(result.steps for result in results)
    terms: dict[str, float] = {}
    for result in results:
        for name, value in result.terms.items():
            terms[name] = terms.get(name, 0.0) + value * result.steps / steps
    terms |= {f"server/{name}": value for name, value in reported.items()}
    report = RoundReport(context, tuple(result.egress for result in results), terms, steps)
    anew = method.server_step.closes and context.round == context.rounds
    server = server.averaged({} if anew else state.server.averages, method.averaging)
    return replace(state, round=context.round, server=server, silos=silos), report
