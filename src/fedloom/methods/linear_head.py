"""A linear classifier on embeddings, averaged over everybody: FedAvg, FedProx, FedLambda and DP logistic regression.

The baselines of Di Salvo, Nguyen, Ledig: "Embedding-Based Federated Data Sharing via Differentially Private Conditional
VAEs", MICCAI 2025 (arXiv 2507.02671): FedAvg (McMahan et al., AISTATS 2017); FedProx with ``proximal`` = mu (Li et al.,
MLSys 2020, equation 2); FedLambda is this head mixed with each silo's own by ``fedloom downstream``, after Marfoq et
al., "Personalized Federated Learning through Local Memorization", ICML 2022. Under DP-SGD it is DP logistic
regression. It classifies and generates nothing. Milestones are shares of the rounds; in the authors' code they pass
within the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Phase, Recipe, Setting
from fedloom.methods.labels import VECTORS, require_classes
from fedloom.methods.steps import Merged
from fedloom.models.labelled import LinearHead
from fedloom.objectives.base import Objective
from fedloom.objectives.labelled import CrossEntropy
from fedloom.objectives.proximal import Proximal
from fedloom.settings import at_least
from fedloom.sharing.plan import GLOBAL, SharingPlan


@dataclass(frozen=True, kw_only=True)
class LinearHeadOptions:
    """Plain FedAvg unless told."""

    proximal: float = field(default=0.0, metadata=at_least(0))
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    milestones: tuple[float, ...] = field(
        default=(),
        metadata={"check": lambda value: all(0 < share < 1 for share in value), "rule": "numbers between 0 and 1"},
    )


def build(setting: Setting, _: Site) -> LinearHead:
    """A linear layer from embedding to classes with fresh weights."""
    return LinearHead(setting.shape[0], len(setting.classes))


def make(setting: Setting, options: LinearHeadOptions) -> Method:
    """Block ``head`` GLOBAL."""
    require_classes(setting, "linear_head")
    local, private = setting.config.local, setting.config.privacy.mechanism != "none"
    optimizer = OptimizerRule.of(local)
    plain = OptimizerRule("sgd", local.learning_rate, keep=local.keep_optimizer)
    if options.milestones and (optimizer != plain or private):
        raise ConfigError(
            "method.milestones scales the loss, which is a scale of the rate for local.optimizer = 'sgd' without "
            "privacy alone, and with no other settings of 'sgd' but its rate; leave it out"
        )
    plan = SharingPlan({"head": GLOBAL}, setting.groups).with_scopes(setting.config.sharing.scopes)
    objective: Objective = CrossEntropy(options.milestones, options.weight_decay)
    if options.proximal:
        objective = Proximal(objective, options.proximal)
    return Method(
        name="linear_head",
        plan=plan,
        build=partial(build, setting),
        phases=(Phase("head", ("head",), objective, optimizer),),
        server_step=Merged(),
        pathways={},
        learns_labels=True,
    )


RECIPE = Recipe(
    "linear_head", "a linear classifier: FedAvg, FedProx or DP logistic regression", LinearHeadOptions, make, VECTORS
)
