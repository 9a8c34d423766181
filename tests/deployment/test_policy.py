"""A silo's policy: what it refuses, and that it says why."""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import tomli_w
import torch

import fedloom
from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import write_records
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.policy import Policy, policy_text
from fedloom.deployment.worker import service
from fedloom.engines.base import site_of
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rounds import ShortRoundError
from fedloom.engines.remote.silo import Grant, SiloService
from fedloom.engines.remote.work import Order, RefusedError
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, fresh_blocks
from fedloom.privacy.accounting import Budget
from fedloom.privacy.clipping import SMALLEST
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.sharing.codec import packed
from fedloom.sharing.plan import BlockKey
from fedloom.streams import Streams
from local_grid import Deployment
from plugins import LOOMS, LOOMS_POINTS, install
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
    "unit": (PRIVATE, (*DP, "privacy.unit=subject"), "protects each subject, and policy.toml asks for unit = 'record'"),
    "unit of what is only counted": ({"unit": "subject"}, DP, "each record, and policy.toml asks for unit = 'subject'"),
    "tiny clip": (
        PRIVATE,
        (*DP, "privacy.clip=0.0009"),
        r"clips at 0\.0009; policy\.toml asks for at least 0\.001 \(min_clip\)",
    ),
    "huge steps": (
        PRIVATE | {"max_steps": 25},
        (*DP, "local.steps=25", "privacy.pretraining=1", "sharing.scopes={encoder='silo'}"),
        r"takes 26 noisy steps in a round; policy\.toml allows 25 \(max_steps\)",
    ),
    "tiny noise": (
        PRIVATE,
        (*DP, "privacy.noise_multiplier=0.299"),
        r"the noise multiplier 0\.299; policy\.toml asks for at least 0\.3 \(min_noise\)",
    ),
    "no guarantee": (
        PRIVATE,
        (*DP, "privacy.blocks=['decoder']"),
        "gives no DP guarantee .* policy.toml asks for one",
    ),
}


def deployed(path: Path, policy: Policy, *overrides: str) -> Deployment:
    def agreement(config: Config, method: Method, plan: SiloPrivacy | None) -> Grant:
        if objection := policy.objection(config, method, plan):
            raise RefusedError(objection)
        return policy.grant

    config = tiny_config("method.name=fedvae", "rounds=1", "data.silos=1", "engine.name=reference", *overrides)
    whole = build_federation(config.data, Streams(config.seed))
    # Each record is of a person of its own, so that the two units differ in nothing but their name.
    silos = tuple(replace(s, train=replace(s.train, subject=torch.arange(len(s)))) for s in whole.silos)
    return Deployment(path, config, replace(whole, silos=silos), agreement=agreement)


@pytest.mark.parametrize(("change", "overrides", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_what_was_not_agreed_to_is_refused(
    tmp_path: Path, change: dict[str, object], overrides: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ShortRoundError, match=reason):
        deployed(tmp_path, Policy.of(OPEN | change), *overrides).run()
    assert not list(tmp_path.rglob("ledger.sqlite"))


def answering_silo(path: Path, config: Config, policy: dict[str, object]) -> SiloService:
    """The silo 'mnist-0' as its worker runs it, with its policy in a file."""
    federation = build_federation(config.data, Streams(config.seed))
    silos = {silo.name: federation.groups[silo.groups[0]] for silo in federation.silos}
    charter = Charter(name="x", address="h:1", silos=silos, shape=federation.shape, classes=federation.classes)
    home = SiloDirectory.create(path / "home", Invitation("mnist-0", charter, "none"))
    (home.path / "policy.toml").write_text(tomli_w.dumps(policy))
    write_records(path / "own.npz", federation, federation.silos[0].train, federation.test.of_group(0))
    return service(home, path / "own.npz")


def first_task(config: Config, blocks: Mapping[BlockKey, bytes] = MappingProxyType({})) -> Frame:
    """What a server sends, with the blocks that come down."""
    return Order("run-1", config, RoundContext(1, 2, (0, 1)), settled=0).frame(blocks)


@pytest.mark.parametrize(
    ("change", "overrides", "objection"),
    [
        ({"methods": ["moon"]}, (), "has the method"),
        ({"experiments": ["ab"]}, (), "has the experiment"),
        (PRIVATE, (*DP, "privacy.unit=subject"), "protects each subject"),
        (PRIVATE, (*DP, "privacy.clip=0.0009"), "clips at"),
        (PRIVATE, (*DP, f"local.steps={10**12}"), f"takes {10**12} noisy steps"),
        (PRIVATE, (*DP, "local.steps=1", "privacy.pretraining=10000"), "takes 10001 noisy steps"),
    ],
)
def test_nothing_is_built_of_an_experiment_that_was_not_agreed_to(
    tmp_path: Path,
    change: dict[str, object],
    overrides: tuple[str, ...],
    objection: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also no noise is planned for it: the accounting of 10^12 steps would take hours."""
    small = ("data.silos=1", "data.records_per_silo=16", "engine.name=reference")
    config = tiny_config("method.name=fedvae", *small, *overrides)
    answering = answering_silo(tmp_path, config, OPEN | change)
    monkeypatch.setattr("fedloom.engines.remote.silo.make_method", lambda _: pytest.fail("a method was made"))
    answer = answering.answer(first_task(config))
    assert answer.kind == "refused"
    assert answer.header["reason"].startswith(f"silo 'mnist-0' does not agree: the experiment {objection}")


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


@pytest.mark.parametrize(
    ("bound", "towards"),
    [("max_epsilon", 0.0), ("max_delta", 0.0), ("min_clip", math.inf), ("min_noise", math.inf), ("max_steps", 0.0)],
)
def test_what_is_just_at_a_bound_is_agreed_to_and_nothing_beyond(bound: str, towards: float) -> None:
    """Steps are those of a round and of pretraining together."""
    config = tiny_config("method.name=fedvae", *DP, "sharing.scopes={encoder='silo'}", "privacy.pretraining=3")
    experiment = Experiment.of(config)
    method, plan = experiment.method, experiment.trainer.privacy[0]
    asked = {
        "max_epsilon": 8.0,
        "max_delta": plan.granted.delta,
        "min_clip": 1.0,
        "min_noise": plan.least_noise,
        "max_steps": 5 + 3,  # 40 records in batches of 8
    }
    policy = Policy.of(OPEN | PRIVATE | asked)
    assert policy.objection(config, method, plan) == ""
    value = asked[bound]
    beyond = value - 1 if isinstance(value, int) else math.nextafter(value, towards)
    objection = replace(policy, **{bound: beyond}).objection(config, method, plan)
    assert objection.startswith("the experiment")
    word = {"max_epsilon": "epsilon 8", "max_delta": "delta", "min_clip": "clips", "min_noise": "noise multiplier"}
    assert word.get(bound, "8 noisy steps") in objection


@pytest.mark.parametrize(("unit", "other"), [("record", "subject"), ("subject", "record")])
def test_the_policy_and_not_the_first_experiment_chooses_the_unit(
    tmp_path: Path, unit: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy.of(OPEN | PRIVATE | {"unit": unit})
    with pytest.raises(ShortRoundError, match=f"protects each {other}, and policy.toml asks for unit = '{unit}'"):
        deployed(tmp_path, policy, *DP, f"privacy.unit={other}").run("first", "run-1")
    deployment = deployed(tmp_path, policy, *DP, f"privacy.unit={unit}")
    deployment.run("second", "run-2")
    (account,) = read_accounts(deployment.home(0) / "ledger.sqlite")
    assert account.budget.unit == unit
    changed = Policy.of(OPEN | PRIVATE | {"unit": other})
    with pytest.raises(ShortRoundError):
        deployed(tmp_path, changed, *DP, f"privacy.unit={other}").run("third", "run-3")
    assert f"keeps account of each {unit} of silo 'mnist-0', but privacy.unit = '{other}' is asked for" in caplog.text
    assert read_accounts(deployment.home(0) / "ledger.sqlite") == [account]


@pytest.mark.parametrize(("asked", "kept"), [(0.0, 1e-3), (1e-7, 1e-7)])
def test_the_policy_chooses_the_delta_of_the_lifetime(
    tmp_path: Path, asked: float, kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever delta an experiment asks for; a silo has 40 records."""
    policy = Policy.of(OPEN | PRIVATE | {"delta": asked, "max_epsilon": 99.0})
    deployment = deployed(tmp_path, policy, *DP, "privacy.delta=1e-2")
    deployment.run()
    (account,) = read_accounts(deployment.home(0) / "ledger.sqlite")
    assert account.budget == Budget(99.0, kept, "filter")
    with pytest.raises(ShortRoundError):
        deployed(tmp_path, replace(policy, delta=1e-5), *DP).run("again", "run-2")
    assert f"epsilon 99 at delta {kept:g} by filter, but epsilon 99 at delta 1e-05" in caplog.text


def test_noise_for_tests_goes_with_no_promise() -> None:
    for change in ({}, {"privacy": "dp-sgd"}):
        with pytest.raises(ConfigError, match=r"noise = 'test' protects nothing; set privacy = 'none' beside it, or "):
            Policy.of({"noise": "test", **change})
    assert Policy.of({"noise": "test", "privacy": "none"}).grant == Grant(math.inf, repeatable=True, pace=0.5)
    assert Policy.of({"noise": "secure"}).grant == Grant(8.0, min_clip=0.001, pace=0.5)
    assert Policy.of({"min_clip": 0.0}).grant == Grant(8.0, min_clip=SMALLEST, pace=0.5)
    assert Policy.of({"privacy": "none"}).grant == Grant(math.inf, pace=0.5), "what is only counted has secure noise"


@pytest.mark.parametrize(
    ("key", "value"),
    [("unit", "person"), ("delta", 1.0), ("min_clip", -0.1), ("max_steps", 0), ("max_steps", 0.5), ("min_noise", -1.0)],
)
def test_a_value_that_means_nothing_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.{key}"):
        Policy.of({key: value})


def test_the_file_that_a_new_silo_gets_is_the_default_policy() -> None:
    assert Policy.of(tomllib.loads(policy_text())) == Policy()


def test_the_pace_of_answers_is_the_policys() -> None:
    assert Policy.of({"pace": 2.0}).grant.pace == 2.0
    with pytest.raises(ConfigError, match=r"policy.pace = -1 must be at least 0"):
        Policy.of({"pace": -1})


def test_a_mistake_in_the_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'policy.method'; did you mean 'policy.methods'"):
        Policy.of({"method": ["fedvae"]})


SMALL = ("data.silos=1", "data.records_per_silo=16", "engine.name=reference")
PLUGINS = {"methods": ["shuttle", "looms:RECIPE", "fissionvae", "os:system", "fedloom.methods.fedvae:RECIPE"]}


@pytest.mark.parametrize("allowed", [[], ["looms==1.1"], ["spools==1.2", "os==1.2"]])
@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("method.name=shuttle", "method 'shuttle'"),
        ("method.name=looms:RECIPE", "method 'looms:RECIPE'"),
        ("method.name=os:system", "method 'os:system'"),
        ("method.name=fedloom.methods.fedvae:RECIPE", "method 'fedloom.methods.fedvae:RECIPE'"),
        ("method.prior=threes", "prior 'threes'"),
        ("method.prior=looms:THREES", "prior 'looms:THREES'"),
        ("method.prior=antigravity:fly", "prior 'antigravity:fly'"),
        ("model.network=antigravity:fly", "network 'antigravity:fly'"),
        ("server.step=antigravity:fly", "server step 'antigravity:fly'"),
        ("server.merge.name=antigravity:fly", "merge 'antigravity:fly'"),
    ],
)
def test_a_silo_imports_no_plug_in_that_its_operator_does_not_name(
    tmp_path: Path, plugin_folder: Path, allowed: list[str], override: str, what: str
) -> None:
    """Neither by its name nor by an import path, whatever a server asks for, and also where the method is agreed to."""
    install(plugin_folder, "looms", "1.2", LOOMS, LOOMS_POINTS)
    config = tiny_config("method.name=fissionvae", *SMALL, override)
    silo = answering_silo(tmp_path, config, OPEN | PLUGINS | {"plugins": allowed})
    answer = silo.answer(first_task(config))
    assert (answer.kind, answer.header["reason"]) == (
        "refused",
        f"silo 'mnist-0' does not agree: policy.toml allows no plug-in that brings {what}",
    )
    assert not {"looms", "antigravity"} & set(sys.modules)


def test_a_silo_trains_by_plug_ins_that_its_policy_names_as_long_as_it_does(
    tmp_path: Path, plugin_folder: Path
) -> None:
    install(plugin_folder, "looms", "1.2", LOOMS, LOOMS_POINTS)
    config = tiny_config("method.name=shuttle", "method.prior=threes", *SMALL)
    silo = answering_silo(tmp_path, config, OPEN | PLUGINS | {"plugins": ["Looms==1.2"]})
    assert "looms" not in sys.modules
    experiment = Experiment.of(config)
    site = site_of(experiment.federation, 0)
    fresh = fresh_blocks(experiment.method, site, Streams(config.seed))
    task = first_task(config, {key: packed(part) for key, part in fresh.items() if key.block == "encoder"})
    assert silo.answer(task).kind == "update"
    (tmp_path / "home" / "policy.toml").write_text(tomli_w.dumps(OPEN | PLUGINS))
    assert silo.answer(task).header["reason"].endswith("allows no plug-in that brings method 'shuttle'")


@pytest.mark.parametrize("package", ["looms", "looms>=1.2", "looms==", "==1.2", "looms==1.2 or so"])
def test_a_plug_ins_package_is_named_in_a_version(package: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy.of({"plugins": [package]})
    assert str(caught.value) == f"policy.plugins: '{package}' must be a package in a version, such as 'looms==1.2'"


def test_the_device_of_training_is_the_policys() -> None:
    assert Policy.of({}).grant.device == "auto"
    assert Policy.of({"device": "cpu"}).grant.device == "cpu"
    with pytest.raises(ConfigError, match=r"policy.device: unknown value 'tpu'"):
        Policy.of({"device": "tpu"})
