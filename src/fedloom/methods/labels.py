"""What methods that generate labelled records share: class counts that leave with noise, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.errors import ConfigError
from fedloom.federation.records import Batch
from fedloom.methods.base import Method, PayloadRule, Setting
from fedloom.methods.generator import LABEL_SHARES
from fedloom.methods.steps import ServerRound, ServerStep, Stepped, Steps
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.settings import portion
from fedloom.sharing.plan import payload_of_sums

Labels = Literal["global-dp", "uniform", "local"]  # of synthetic records: as noisy counts say, alike, as at each silo
VECTORS = ("vector",)  # what they learn
COUNTS = "class-counts"
SHARE = 0.02  # of the budget
SMALLEST_SHARE = 0.05  # of an equal one: no class disappears because of noise


@dataclass(frozen=True, kw_only=True)
class TemperedLabels:
    """``label_exponent`` flattens a long tail of classes among samples: 1 leaves the label shares, 0 makes them equal.

    It looks at nothing but shares that were released already, so it costs nothing.
    """

    label_exponent: float = field(default=1.0, metadata=portion())


@dataclass(frozen=True, kw_only=True)
class LabelOptions(TemperedLabels):
    """Where label shares come from, too."""

    labels: Labels = "global-dp"


@dataclass(frozen=True)
class CountClasses:
    """One for the record's class, in its group."""

    groups: int
    classes: int

    def __call__(self, _: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """A row for each record, group after group."""
        groups, classes = functional.one_hot(batch.group, self.groups), functional.one_hot(batch.y, self.classes)
        return {"counts": (groups.unsqueeze(2) * classes.unsqueeze(1)).flatten(1).to(torch.float32)}


@dataclass(frozen=True)
class LabelShares(ServerStep):
    """Remembers how frequent each class is in each group."""

    groups: int
    exact: bool  # whether counts came without noise

    def __call__(self, round: ServerRound) -> Stepped:
        """By the counts, where some have come."""
        sent = [update.payloads[COUNTS]["counts"] for update in round.updates if COUNTS in update.payloads]
        if not sent:
            return Stepped(round.state)
        # Silos send them in different rounds, each in the first that it takes part in.
        memory = round.state.memory
        counts = torch.stack(sent).to(torch.float64).sum(dim=0) + memory.get(COUNTS, 0.0)
        shares = self.shares(counts.reshape(self.groups, -1))
        known = {COUNTS: counts, LABEL_SHARES: shares if self.groups > 1 else shares[0]}
        return Stepped(replace(round.state, memory={**memory, **known}))

    def shares(self, counts: Tensor) -> Tensor:
        """A row for each group, without classes that only other groups have; a class that none has is rare in each."""
        positive = counts.clamp_min(0.0)
        least = SMALLEST_SHARE * positive.mean(dim=1, keepdim=True)
        had = positive > 0 if self.exact else positive >= least
        shares = torch.where(had | ~had.any(dim=0), torch.maximum(positive, least), 0.0)
        shares = torch.where(positive.any(dim=1, keepdim=True), shares, 1.0)  # of an unknown group all alike
        return shares / shares.sum(dim=1, keepdim=True)


def with_labels(method: Method, setting: Setting, options: LabelOptions) -> Method:
    """The method, sending class counts once where synthetic labels shall follow them."""
    method = replace(method, label_exponent=options.label_exponent)
    if options.labels != "global-dp":
        return method
    groups, classes = len(setting.groups), len(setting.classes)
    where = " in each group" if groups > 1 else ""
    what = f"one count of each class{where}, to one of which a record adds 1"
    payload = payload_of_sums(COUNTS, what, {"counts": (groups * classes,)})
    release = PayloadRule(payload, BoundedSum(CountClasses(groups, classes)), share=SHARE)
    exact = setting.config.privacy.mechanism == "none"
    return replace(
        method,
        plan=replace(method.plan, payloads=(*method.plan.payloads, payload)),
        payloads=(*method.payloads, release),
        server_step=Steps((method.server_step, LabelShares(groups, exact))),
    )


def require_classes(setting: Setting, method: str) -> None:
    """Complain unless there are at least two."""
    if len(setting.classes) < 2:
        raise ConfigError(f"method '{method}' needs records of at least two classes, not {len(setting.classes)}")
