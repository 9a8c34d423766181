"""A silo's policy: what it refuses, and that it says why."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

import fedloom
from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import write_records
from fedloom.deployment.homes import Invitation, SiloHome
from fedloom.deployment.policy import Policy, policy_text
from fedloom.deployment.worker import service
from fedloom.engines.flower.frames import Frame
from fedloom.engines.flower.rounds import ShortRoundError
from fedloom.engines.flower.silo import Grant, RefusedError
from fedloom.engines.flower.work import Order
from fedloom.errors import ConfigError
from fedloom.federation.building import build_federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method
from fedloom.privacy.planning import SiloPlan
from fedloom.streams import Streams
from local_grid import Deployment
from support import tiny_config

OPEN = {"methods": ["fedvae"], "blocks": ["encoder", "decoder"], "payloads": ["records"], "privacy": "none"}
DP = ("privacy.mechanism=dp-sgd", "local.batch_size=8", "privacy.epsilon=8.0", "privacy.accountant=filter")
PRIVATE = {"privacy": "dp-sgd", "max_delta": 0.1}
REFUSALS = {
    "method": ({"methods": ["moon"]}, (), "the experiment has the method 'fedvae', and policy.toml allows methods = m"),
    "block": ({"blocks": ["decoder"]}, (), "the experiment has the block 'encoder', and policy.toml allows blocks = d"),
    "payload": ({"payloads": []}, (), "the experiment has the payload 'records', and policy.toml allows .* = none"),
    "experiment": ({"experiments": ["ab"]}, (), "the experiment has the experiment '[0-9a-f]{64}', and policy.toml"),
    "no privacy": ({"privacy": "dp-sgd"}, (), "privacy.mechanism = 'none', and policy.toml asks for .* = 'dp-sgd'"),
    "epsilon": (
        {"privacy": "dp-sgd", "max_epsilon": 1.0, "max_delta": 0.1},
        DP,
        "asks for epsilon 8; policy.toml allows 1",
    ),
    "delta": (
        {"privacy": "dp-sgd", "max_epsilon": 9.0, "max_delta": 1e-7},
        DP,
        "asks for delta .*; policy.toml allows 1e-07",
    ),
    "shared noise": (PRIVATE, (*DP, "privacy.trust=distributed"), "needs secure aggregation"),
    "no guarantee": (
        PRIVATE,
        (*DP, "privacy.blocks=['decoder']"),
        "gives no DP guarantee .* policy.toml asks for one",
    ),
}


def deployed(path: Path, policy: Policy, *overrides: str) -> Deployment:
    def agreement(config: Config, method: Method, plan: SiloPlan | None) -> Grant:
        if objection := policy.objection(config, method, plan):
            raise RefusedError(objection)
        return policy.grant

    config = tiny_config("method.name=fedvae", "rounds=1", "data.silos=1", "engine.name=reference", *overrides)
    return Deployment(path, config, build_federation(config.data, Streams(config.seed)), agreement=agreement)


@pytest.mark.parametrize(("change", "overrides", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_what_was_not_agreed_to_is_refused(
    tmp_path: Path, change: dict[str, object], overrides: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ShortRoundError, match=reason):
        deployed(tmp_path, Policy.of(OPEN | change), *overrides).run()
    assert not list(tmp_path.rglob("ledger.sqlite"))


@pytest.mark.parametrize("change", [{"methods": ["moon"]}, {"experiments": ["ab"]}])
def test_nothing_is_built_of_an_experiment_that_was_not_agreed_to(
    tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("method.name=fedvae", "data.silos=1", "data.records_per_silo=16", "engine.name=reference")
    federation = build_federation(config.data, Streams(config.seed))
    silos = {silo.name: federation.groups[silo.groups[0]] for silo in federation.silos}
    charter = Charter(name="x", address="h:1", silos=silos, shape=federation.shape, classes=federation.classes)
    home = SiloHome.create(tmp_path / "home", Invitation("mnist-0", charter, "none"))
    (home.path / "policy.toml").write_text(tomli_w.dumps(OPEN | change))
    write_records(tmp_path / "own.npz", federation, federation.silos[0].train, federation.test.of_group(0))
    monkeypatch.setattr("fedloom.engines.flower.silo.make_method", lambda _: pytest.fail("a method was made"))
    task = Order("run-1", config, RoundContext(1, 2, (0, 1)), settled=0)
    frame = task.frame({})
    answer = service(home, tmp_path / "own.npz").answer(frame)
    assert answer.kind == "refused"
    assert answer.header["reason"].startswith("silo 'mnist-0' does not agree: the experiment has the ")


@pytest.mark.parametrize("overrides", [(), DP])
def test_what_was_agreed_to_runs(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    policy = Policy.of(OPEN | {"privacy": "dp-sgd" if overrides else "none", "max_delta": 0.1})
    assert deployed(tmp_path, policy, *overrides).run().folder.status["state"] == "finished"


def test_one_experiment_can_be_agreed_to_by_its_digest(tmp_path: Path) -> None:
    digest = deployed(tmp_path / "other", Policy()).config.digest()
    deployed(tmp_path, Policy.of(OPEN | {"experiments": [digest]})).run()


def test_another_version_is_refused(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, Policy.of(OPEN))
    answer = deployment.grid.handlers["mnist-0"]

    def of_tomorrow(frame: Frame) -> Frame:
        return answer(Frame({**frame.header, "version": "99.0"}, frame.parts))

    deployment.grid.handlers["mnist-0"] = of_tomorrow
    deployment.run()
    (reason,) = deployment.reasons("refused")
    assert reason == f"the server runs fedloom 99.0, silo 'mnist-0' {fedloom.__version__}"


def test_a_round_that_was_not_drawn_is_refused(tmp_path: Path) -> None:
    """Otherwise a server could spend more of a silo's budget than was planned in public."""
    deployment = deployed(tmp_path, Policy.of(OPEN), "participation.rate=0.5", "participation.mode=fixed")
    seen: list[Frame] = []
    for name, answer in list(deployment.grid.handlers.items()):
        deployment.grid.handlers[name] = lambda frame, answer=answer: (seen.append(frame), answer(frame))[1]  # type: ignore[misc]
    (row,) = deployment.run().metrics()
    (drawn,) = row["participants"]
    asked = deployment.service(1 - drawn).answer(seen[0])
    assert asked.kind == "refused"
    assert asked.header["reason"] == f"silo '{deployment.federation.silos[1 - drawn].name}' was not drawn for round 1"


def test_the_file_that_a_new_silo_gets_is_the_default_policy() -> None:
    assert Policy.of(tomllib.loads(policy_text())) == Policy()


def test_the_pace_of_answers_is_the_policys() -> None:
    assert Policy.of({"pace": 2.0}).grant.pace == 2.0
    with pytest.raises(ConfigError, match=r"policy.pace = -1 must be at least 0"):
        Policy.of({"pace": -1})


def test_a_mistake_in_the_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'policy.method'; did you mean 'policy.methods'"):
        Policy.of({"method": ["fedvae"]})
