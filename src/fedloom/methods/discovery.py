"""A method whose silos are grouped by what they release before the first round."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom.config import Config
from fedloom.discovery.release import RELEASE, SHARE, check_discovery, payload, statistic
from fedloom.methods.base import Method, PayloadRule


def with_discovery(method: Method, config: Config) -> Method:
    """The method with that release, where groups are to be found."""
    if config.data.groups != "discover":
        return method
    check_discovery(config)
    rule = PayloadRule(payload(config), statistic(config), "before", SHARE)
    plan = replace(method.plan, payloads=(*method.plan.payloads, rule.payload))
    return replace(method, plan=plan, payloads=(*method.payloads, rule))


def with_question(method: Method, config: Config, bases: Tensor) -> Method:
    """The method whose silos are asked for these bases in that release."""
    asked = statistic(config, bases)
    rules = (replace(rule, statistic=asked) if rule.name == RELEASE else rule for rule in method.payloads)
    return replace(method, payloads=tuple(rules))
