"""What a silo's operator agrees to, in a file of its own; all else is refused, and the refusal says why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedloom.config import Config, PrivacyConfig
from fedloom.errors import ConfigError
from fedloom.settings import at_least, parse, share

if TYPE_CHECKING:
    from fedloom.engines.remote.grants import Grant
    from fedloom.methods.base import Method
    from fedloom.privacy.silo_privacy import SiloPrivacy

PACKAGE = re.compile(r"[\w.-]+==[\w.!+-]+", re.ASCII)
TEXT = """\
# What this silo agrees to. A task that does not keep to it is refused, and the server is told why.
# The file is read anew for every task.

methods = []            # names of methods that may run here, such as ["fissionvae"]; empty: none
blocks = []             # blocks of the model that may leave, such as ["encoder", "decoder"]; empty: none
payloads = ["records"]  # what else may leave: "records" is the number of records, the weight in the mean
plugins = []            # packages whose plug-ins may be imported, in this version, such as ["looms==1.2"]
experiments = []        # digests of experiments ('fedloom inspect' and refusals show them); empty: any
approvers = []          # public keys of people, such as ["ssh-ed25519 AAAA... anna"]; see 'federation approve'
approvals = 0           # how many of them must have signed an experiment before it may run; 2: four eyes

privacy = "dp-sgd"      # the least that is asked for: "dp-sgd", or "none"
unit = "record"         # what every private experiment must protect: "record", or "subject"; cannot be changed later
max_epsilon = 8.0       # spent on this silo's data by all runs together; may be lowered later, not raised
delta = 0.0             # at which max_epsilon holds; 0: the largest power of ten that is at most 1 / (10 n)
max_delta = 1e-4        # of one experiment
min_clip = 0.001        # the least clip bound that an experiment may ask for, or be led to by its gradients
max_steps = 10000       # noisy steps in one round, with those of pretraining
min_noise = 0.3         # the least noise multiplier of any step or payload
noise = "secure"        # "secure"; "test" draws noise that can be repeated and protects nothing
silos = {}              # others' keys, as {north = "fingerprint"}: under these this silo may share noise with them
device = "auto"         # where this silo trains: "cpu"; "cuda"; "auto": a GPU if there is one, but never under DP-SGD
pace = 0.5              # under DP-SGD an answer leaves at a whole multiple of so many seconds after its task came
"""


def policy_text() -> str:
    """The file as a new silo finds it: it agrees to nothing yet."""
    return TEXT


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a silo's operator agrees to; a task that asks for more is refused."""

    methods: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    payloads: tuple[str, ...] = ("records",)
    plugins: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    approvers: tuple[str, ...] = ()
    approvals: int = field(default=0, metadata=at_least(0))
    privacy: Literal["none", "dp-sgd"] = "dp-sgd"
    unit: Literal["record", "subject"] = "record"
    max_epsilon: float = field(default=8.0, metadata=at_least(0))
    delta: float = field(default=0.0, metadata=share())
    max_delta: float = field(default=1e-4, metadata=share())
    min_clip: float = field(default=0.001, metadata=at_least(0))
    max_steps: int = field(default=10_000, metadata=at_least(1))
    min_noise: float = field(default=0.3, metadata=at_least(0))
    noise: Literal["secure", "test"] = "secure"
    silos: dict[str, str] = field(default_factory=dict)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    pace: float = field(default=0.5, metadata=at_least(0))

    def __post_init__(self) -> None:
        for package in self.plugins:
            if not PACKAGE.fullmatch(package):
                raise ConfigError(f"policy.plugins: '{package}' must be a package in a version, such as 'looms==1.2'")
        if self.approvals > len(self.approvers):
            raise ConfigError(
                f"policy.approvals = {self.approvals} asks for more people than policy.approvers names: "
                f"{len(self.approvers)}"
            )
        if self.noise == "test" and self.privacy == "dp-sgd":
            raise ConfigError(
                "policy.noise = 'test' protects nothing; set privacy = 'none' beside it, or noise = 'secure'"
            )

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Policy:
        """The policy that a table of TOML declares."""
        return parse(cls, mapping, "policy")

    def first_objection(self, config: Config) -> str:
        """Why a task is refused before anything of its experiment is built; empty where it may be looked at."""
        steps = (config.local.steps or config.local.epochs) + config.privacy.pretraining  # or more
        return self._choice_objection(config) or self._settings_objection(config.privacy, steps)

    def objection(self, config: Config, method: Method, plan: SiloPrivacy | None) -> str:
        """Why a task is refused; empty where the operator agrees to it."""
        leaving = [name for name, rule in method.plan.blocks.items() if rule.up]
        sent = [payload.name for payload in method.plan.payloads]
        return (
            self._choice_objection(config)
            or _not_in("block", leaving, self.blocks, "blocks")
            or _not_in("payload", sent, self.payloads, "payloads")
            or self._privacy_objection(plan)
        )

    @property
    def grant(self) -> Grant:
        """What may be spent on the silo's data, by all runs together, and where noise comes from."""
        from fedloom.engines.remote.grants import Grant
        from fedloom.privacy.clipping import SMALLEST

        private = self.privacy == "dp-sgd"
        return Grant(
            self.max_epsilon if private else math.inf,
            self.delta,
            self.unit,
            repeatable=self.noise == "test",
            device=self.device,
            min_clip=max(self.min_clip, SMALLEST) if private else SMALLEST,
            pace=self.pace,
            silos=self.silos,
        )

    def _choice_objection(self, config: Config) -> str:
        return _not_in("method", [config.method.name], self.methods, "methods") or (
            _not_in("experiment", [config.digest()], self.experiments, "experiments") if self.experiments else ""
        )

    def _privacy_objection(self, plan: SiloPrivacy | None) -> str:
        if plan is None:
            asked = "the experiment has privacy.mechanism = 'none', and policy.toml asks for privacy = 'dp-sgd'"
            return asked if self.privacy == "dp-sgd" else ""
        return self._settings_objection(plan.settings, plan.steps + plan.pretraining) or (
            self._guarantee_objection(plan) if self.privacy == "dp-sgd" else ""
        )

    def _settings_objection(self, settings: PrivacyConfig, steps: int) -> str:
        """What can be told before noise is planned, which takes long for very many steps."""
        if settings.mechanism == "none":
            return ""
        if settings.unit != self.unit:  # also where spending is only counted: the costs of the two do not add up
            return f"the experiment protects each {settings.unit}, and policy.toml asks for unit = '{self.unit}'"
        if self.privacy == "none":
            return ""
        if settings.clip < self.min_clip:
            return (
                f"the experiment clips at {settings.clip:g}; policy.toml asks for at least {self.min_clip:g} (min_clip)"
            )
        if steps > self.max_steps:
            return (
                f"the experiment takes {steps} noisy steps in a round; policy.toml allows {self.max_steps} (max_steps)"
            )
        return ""

    def _guarantee_objection(self, plan: SiloPrivacy) -> str:
        if plan.problem:
            return f"the experiment gives no DP guarantee ({plan.problem}), and policy.toml asks for one"
        if not plan.granted.epsilon <= self.max_epsilon:
            return f"the experiment asks for epsilon {plan.granted.epsilon:g}; policy.toml allows {self.max_epsilon:g}"
        if plan.granted.delta > self.max_delta:
            return f"the experiment asks for delta {plan.granted.delta:g}; policy.toml allows {self.max_delta:g}"
        if plan.least_noise < self.min_noise:
            return (
                f"the experiment has the noise multiplier {plan.least_noise:.3g}; policy.toml asks for at least "
                f"{self.min_noise:g} (min_noise)"
            )
        return ""


def _not_in(kind: str, wanted: list[str], allowed: tuple[str, ...], key: str) -> str:
    for name in wanted:
        if name not in allowed:
            listed = ", ".join(allowed) or "none"
            return f"the experiment has the {kind} '{name}', and policy.toml allows {key} = {listed}"
    return ""
