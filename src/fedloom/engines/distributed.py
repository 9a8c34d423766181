"""Distributed noise: where only the sum over all silos is ever seen, each need add but a share of the noise.

Secure sums see to that; a simulation acts them out: the server is shown one update, the sum. What else a silo's
records touch must then never be seen at all, so little qualifies, and what does not is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.methods.base import Method, Phase, unchanged
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.privacy.trust import Distributed
from fedloom.sharing.plan import Scope


def shared_noise(
    config: Config, federation: Federation, method: Method, privacies: Sequence[SiloPrivacy]
) -> tuple[SiloPrivacy, ...]:
    """Each silo's privacy with noise that suffices for the strictest silo, of which each silo adds its share."""
    problem = next(_problems(config, federation, method, privacies), "")
    if problem:
        raise ConfigError(f"privacy.trust = 'distributed' is for one clipped sum in a round, but {problem}")
    trust = Distributed(len(federation), config.privacy.tolerated)
    shared = tuple(replace(privacy, trust=trust, partners=tuple(privacies)) for privacy in privacies)
    for privacy in shared:
        _ = privacy.grids  # complains of what cannot be had before a run folder exists
    return shared


def of_sums(method: Method) -> Method:
    """The method whose server sees sums and plain means alone, in which the noise of each silo counts the same."""
    return replace(method, plan=method.plan.summed(), aggregator=replace(method.aggregator, weighting="equal"))


def takes_step_with_sum(method: Method, privacies: Sequence[SiloPrivacy]) -> bool:
    """Whether a simulation, too, has whole numbers added up and the round's one step taken by whoever sees the sum.

    Else each silo takes the step with a share of continuous noise, and their mean comes to the same. That will not do
    where a copy gets noise from silos that do not have it, or where payloads must not come from a silo's own step.
    """
    shared = any(isinstance(privacy.trust, Distributed) for privacy in privacies)
    grouped = any(rule.scope is Scope.GROUP for rule in method.plan.blocks.values())
    return shared and bool(method.phases) and (grouped or bool(method.payloads))


def _problems(
    config: Config, federation: Federation, method: Method, privacies: Sequence[SiloPrivacy]
) -> Iterator[str]:
    """Why the server would see more than sums, or silos would need more noise than others add for them."""
    if any(len(privacy.rounds) < config.rounds for privacy in privacies):
        yield f"silos are absent from some rounds (participation.rate = {config.participation.rate:g}); it must be 1"
    for rule in method.payloads:
        if rule.statistic.problem:
            yield f"payload '{rule.name}' is no such sum: {rule.statistic.problem}"
    if len(method.phases) > 1:
        yield f"method '{method.name}' has {len(method.phases)} phases"
    for phase in method.phases:
        yield from _problems_of(phase, config, method, privacies)
    for block, shared in method.plan.blocks.items():
        if shared.scope is Scope.GROUP:
            yield from _small_groups(block, config.privacy.tolerated, federation)


def _small_groups(block: str, tolerated: int, federation: Federation) -> Iterator[str]:
    """Groups of which those that are tolerated could tell the only other silo's part in their sum."""
    for number, group in enumerate(federation.groups):
        members = sum(number in silo.groups for silo in federation.silos)
        if members < tolerated + 2:
            yield (
                f"block '{block}' is summed inside group '{group}', which has {members} silos, and it takes at least "
                f"{tolerated + 2}: 2 beside those that may collude or drop out (privacy.tolerated = {tolerated})"
            )


def _problems_of(phase: Phase, config: Config, method: Method, privacies: Sequence[SiloPrivacy]) -> Iterator[str]:
    steps = max(privacy.steps for privacy in privacies)
    if steps != 1:
        yield f"a silo takes {steps} steps in a round; set local.steps = 1"
    if phase.optimizer.name != "sgd":
        yield f"the steps of '{phase.optimizer.name}' are not proportional to the sum; set local.optimizer = 'sgd'"
    if phase.optimizer.clip_norm:
        yield f"local.clip_norm = {phase.optimizer.clip_norm:g} shortens each silo's step by itself; set 0"
    if phase.optimizer.keep and phase.optimizer.momentum:
        yield "local.keep_optimizer keeps the momentum of steps that no silo takes by itself; set false"
    for block, rule in method.plan.blocks.items():
        if rule.scope is Scope.SILO:
            yield f"block '{block}' has scope 'silo', not 'global' or 'group': more than sums depends on records"
    if method.settle is not unchanged:
        yield f"method '{method.name}' changes a silo's weights after its step"
    if config.privacy.clipping != "fixed":
        yield f"privacy.clipping = '{config.privacy.clipping}' makes each silo's bound another; set 'fixed'"
    equal = config.sharing.weights == "equal" or (
        config.sharing.weights == "size" and len({privacy.units for privacy in privacies}) == 1
    )
    if not equal:
        yield "silos weigh differently in the mean; set sharing.weights = 'equal'"
