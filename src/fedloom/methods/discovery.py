"""A method whose silos are grouped by what they release before the first round."""

from __future__ import annotations

from dataclasses import replace

from fedloom.config import Config
from fedloom.discovery.release import SHARE, check_private_discovery, payload, statistic
from fedloom.methods.base import Method, PayloadRule


def with_discovery(method: Method, config: Config) -> Method:
    """The method with that release, where groups are to be found."""
    if config.data.groups != "discover":
        return method
    check_private_discovery(config)
    rule = PayloadRule(payload(config), statistic(config), "before", SHARE)
    plan = replace(method.plan, payloads=(*method.plan.payloads, rule.payload))
    return replace(method, plan=plan, payloads=(*method.payloads, rule))
