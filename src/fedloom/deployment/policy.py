"""What a silo's operator agrees to, in a file of its own; all else is refused, and the refusal says why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedloom.config import Config, at_least, parse, share

if TYPE_CHECKING:
    from fedloom.engines.flower.silo import Grant
    from fedloom.methods.base import Method
    from fedloom.privacy.planning import SiloPlan

TEXT = """\
# What this silo agrees to. A task that does not keep to it is refused, and the server is told why.
# The file is read anew for every task.

methods = []            # names of methods that may run here, such as ["fissionvae"]; empty: none
blocks = []             # blocks of the model that may leave, such as ["encoder", "decoder"]; empty: none
payloads = ["records"]  # what else may leave: "records" is the number of records, the weight in the mean
experiments = []        # digests of experiments ('fedloom inspect' and refusals show them); empty: any

privacy = "dp-sgd"      # the least that is asked for: "dp-sgd", or "none"
max_epsilon = 8.0       # spent on this silo's data by all runs together; may be lowered later, not raised
max_delta = 1e-4        # of one experiment
noise = "secure"        # "secure"; "test" draws noise that can be repeated and protects nothing
pace = 0.5              # under DP-SGD an answer leaves at a whole multiple of so many seconds after its task came
"""


def policy_text() -> str:
    """The file as a new silo finds it: it agrees to nothing yet."""
    return TEXT


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The operator's agreement."""

    methods: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    payloads: tuple[str, ...] = ("records",)
    experiments: tuple[str, ...] = ()
    privacy: Literal["none", "dp-sgd"] = "dp-sgd"
    max_epsilon: float = field(default=8.0, metadata=at_least(0))
    max_delta: float = field(default=1e-4, metadata=share())
    noise: Literal["secure", "test"] = "secure"
    pace: float = field(default=0.5, metadata=at_least(0))

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Policy:
        """From plain values."""
        return parse(cls, mapping, "policy")

    def first_objection(self, config: Config) -> str:
        """Why a task is refused before anything of its experiment is built; empty where it may be looked at."""
        return _not_in("method", [config.method.name], self.methods, "methods") or (
            _not_in("experiment", [config.digest()], self.experiments, "experiments") if self.experiments else ""
        )

    def objection(self, config: Config, method: Method, plan: SiloPlan | None) -> str:
        """Why a task is refused; empty where the operator agrees to it."""
        leaving = [name for name, rule in method.plan.blocks.items() if rule.up]
        sent = [payload.name for payload in method.plan.payloads]
        return (
            self.first_objection(config)
            or _not_in("block", leaving, self.blocks, "blocks")
            or _not_in("payload", sent, self.payloads, "payloads")
            or self._privacy_objection(plan)
        )

    @property
    def grant(self) -> Grant:
        """What may be spent on the silo's data, by all runs together, and where noise comes from."""
        from fedloom.engines.flower.silo import Grant

        epsilon = self.max_epsilon if self.privacy == "dp-sgd" else math.inf
        return Grant(epsilon, repeatable=self.noise == "test", pace=self.pace)

    def _privacy_objection(self, plan: SiloPlan | None) -> str:
        if self.privacy == "none":
            return ""
        if plan is None:
            return "the experiment has privacy.mechanism = 'none', and policy.toml asks for privacy = 'dp-sgd'"
        if plan.problem:
            return f"the experiment gives no DP guarantee ({plan.problem}), and policy.toml asks for one"
        if not plan.granted.epsilon <= self.max_epsilon:
            return f"the experiment asks for epsilon {plan.granted.epsilon:g}; policy.toml allows {self.max_epsilon:g}"
        if plan.granted.delta > self.max_delta:
            return f"the experiment asks for delta {plan.granted.delta:g}; policy.toml allows {self.max_delta:g}"
        return ""


def _not_in(kind: str, wanted: list[str], allowed: tuple[str, ...], key: str) -> str:
    for name in wanted:
        if name not in allowed:
            listed = ", ".join(allowed) or "none"
            return f"the experiment has the {kind} '{name}', and policy.toml allows {key} = {listed}"
    return ""
