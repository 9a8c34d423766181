"""Rounds of which the server sees sums alone: the integers of the simulation, whoever drops out, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.engines.base import initial_state, site_of
from fedloom.engines.masked_sums import MaskedSum, SummedRounds, check_shared, threshold_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.grants import Grant
from fedloom.engines.remote.rounds import ShortRoundError
from fedloom.engines.remote.secure_frames import SECURE, Asked, signed, words_to_sign
from fedloom.engines.remote.work import TASK
from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import read_accounts
from fedloom.secure.terms import Turn
from fedloom.sharing.update import Update
from local_grid import remote
from secure_deployment import SEEDED, SILOS, SecureDeployment, blocks_of, fingerprints, five, shared_config

MOMENTS = shared_config("moments", SEEDED)
TURNS = list(Turn)


@pytest.mark.parametrize("method", ["moments", "refined_moments"])
def test_a_federation_and_its_simulation_have_the_same_integers(method: str, tmp_path: Path) -> None:
    config = shared_config(method, SEEDED)
    simulated = blocks_of(Experiment.of(config, five()).run(tmp_path / "simulated"))
    found = blocks_of(SecureDeployment(tmp_path, config, five()).run())
    assert simulated.keys() == found.keys()
    assert [name for name, tensor in simulated.items() if not torch.equal(tensor, found[name])] == []
    other = blocks_of(SecureDeployment(tmp_path, replace(config, seed=7), five()).run("again", "run-2"))
    assert not torch.equal(other["decoder@server/bias"], found["decoder@server/bias"])


def updates() -> dict[str, Update]:
    """What each silo would send in the clear, made by the simulation."""
    trainer = Experiment.of(MOMENTS, five()).trainer

    start = initial_state(trainer.method, trainer.federation, trainer.config)
    context = RoundContext(1, MOMENTS.rounds, tuple(range(SILOS)))
    tasks = ReferenceEngine(trainer).tasks(start, context)
    return {f"s{task.silo}": trainer.train(task).update for task in tasks}


def summed() -> MaskedSum:
    federation = remote(five())
    method = Experiment.of(MOMENTS, federation).method
    return SummedRounds.declared(MOMENTS, federation, method, {silo.name: len(silo) for silo in five().silos}).of(1)


STEP = ("rounds=2", "local.steps=1", "local.optimizer=sgd", "local.learning_rate=0.5", "sharing.weights=equal")


def test_the_step_of_a_round_is_taken_with_the_sum_of_all_gradients(tmp_path: Path) -> None:
    """Bit for bit what the integers of the simulation's silos give, added up and taken by hand."""
    config = shared_config("linear_head", SEEDED, *STEP)
    run = SecureDeployment(tmp_path, config, five()).run()
    trainer, federation = Experiment.of(config, five()).trainer, five()
    plan, sizes = trainer.privacy[0], {silo.name: len(silo) for silo in federation.silos}
    state = initial_state(trainer.method, federation, config)
    for number in (1, 2):
        context = RoundContext(number, 2, tuple(range(SILOS)))
        layout = SummedRounds.declared(config, remote(federation), trainer.method, sizes).of(number)
        grid = layout.grids["update"]
        assert grid.effective == pytest.approx(plan.noise[number])
        tasks = [replace(task, step=layout.step) for task in ReferenceEngine(trainer).tasks(state, context)]
        total = sum(layout.integers(trainer.train(task).update) for task in tasks)
        gradients = layout.update(total, number).payloads["update"]
        mean = {name.replace("@all:", "."): tensor / SILOS for name, tensor in gradients.items()}
        weights = trainer.step_by(0, tasks[0].received, mean, context)
        site = site_of(federation, 0)
        merged = {k: v for k, v in trainer.method.plan.split(weights, site).items() if v}
        state = replace(state, round=number, server=replace(state.server, blocks={**state.server.blocks, **merged}))
    found = blocks_of(run)
    wanted = {f"{key}/{name}": tensor for key, part in state.server.blocks.items() for name, tensor in part.items()}
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []
    assert all(sorted(row["payloads"]) == ["records", "update"] for row in run.folder.egress())


def test_steps_of_a_federation_are_those_of_the_simulation_but_for_the_noise(tmp_path: Path) -> None:
    """With next to no noise they are the same, and with noise they differ by as much as is charged."""
    quiet = shared_config(
        "linear_head", SEEDED, *STEP, "rounds=1", "privacy.epsilon=0", "privacy.noise_multiplier=1e-3"
    )
    loud = replace(quiet, privacy=replace(quiet.privacy, noise_multiplier=400.0))
    simulated = blocks_of(Experiment.of(quiet, five()).run(tmp_path / "simulated"))
    place = SecureDeployment(tmp_path, quiet, five())
    found = blocks_of(place.run())
    place.config = loud
    noisy = blocks_of(place.run("loud", "run-2"))
    # On the step of 0.5 / 5 silos: 1 / sqrt(5 - 1 - 1) of each silo's noise of 400 bounds of 1 / 20, from each of 5.
    wanted = 0.5 / 5 * 400 * (1 / 20) * math.sqrt(5 / 3)
    moves = torch.cat([(noisy[name] - found[name]).flatten() for name in found if name.endswith(("weight", "bias"))])
    assert moves.square().mean().sqrt().item() == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(moves)))
    for name, tensor in simulated.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4 * wanted)


def killed_at(turn: Turn, *silos: str) -> object:
    """From this turn of the first round on these silos answer nothing."""

    def meddling(silo: str, frame: Frame) -> Frame | None:
        gone = silo in silos and frame.kind == SECURE and TURNS.index(Asked.of(frame).turn) >= TURNS.index(turn)
        return None if gone else frame

    return meddling


@pytest.mark.parametrize("turn", TURNS)
def test_a_silo_that_dies_at_a_turn_is_in_the_sum_if_its_numbers_had_come(turn: Turn, tmp_path: Path) -> None:
    place = SecureDeployment(tmp_path, replace(MOMENTS, rounds=1), five(), meddling=killed_at(turn, "s3"))
    run = place.run()
    there = set(updates()) - ({"s3"} if TURNS.index(turn) <= TURNS.index(Turn.MASKED) else set())
    assert {row["silo"] for row in run.folder.egress()} == there
    assert run.metrics()[0]["participants"] == sorted(int(silo[1:]) for silo in there)
    memory = run.generator().server.memory
    layout, sent = summed(), updates()
    total = layout.update(sum(layout.integers(sent[silo]) for silo in there), 1)
    for name, tensor in total.payloads["moments"].items():
        assert torch.equal(memory[f"moments/{name}"], tensor.double()), name
    assert memory["moments/records"].item() == total.counts["all"] == sum(40 + int(silo[1:]) for silo in there)


def events_of(home: Path) -> int:
    """How often a silo has paid."""
    path = home / "ledger.sqlite"
    return len(read_accounts(path)[0].events) if path.is_file() else 0


@pytest.mark.parametrize("turn", TURNS)
def test_with_too_few_left_nothing_is_unmasked_and_what_was_paid_stays_paid(turn: Turn, tmp_path: Path) -> None:
    meddling = killed_at(turn, "s1", "s4")
    place = SecureDeployment(tmp_path, MOMENTS, five(), meddling=meddling)
    with pytest.raises(ShortRoundError, match=r"3 of 5 silos .*; 4 are needed") as told:
        place.run()
    assert "given up before anything was unmasked" in str(told.value)
    reached = [TURNS.index(Asked.of(frame).turn) for _, frame in place.asked if frame.kind == SECURE]
    assert max(reached) == TURNS.index(turn)
    events = {silo: events_of(place.path / silo) for silo in updates()}
    died_before = {"s1", "s4"} if turn is Turn.MASKED else set()
    paid = set(updates()) - died_before if TURNS.index(turn) >= TURNS.index(Turn.MASKED) else set()
    assert events == {silo: int(silo in paid) for silo in updates()}
    assert not (place.path / "server" / "checkpoints").exists() or not list(
        (place.path / "server" / "checkpoints").iterdir()
    )


def test_a_round_that_was_given_up_is_another_release_when_it_is_done_again(tmp_path: Path) -> None:
    """Of the same numbers under two sets of silos the server would learn the difference."""
    place = SecureDeployment(
        tmp_path, shared_config("moments", "rounds=1"), five(), meddling=killed_at(Turn.REVEAL, "s1", "s4")
    )
    with pytest.raises(ShortRoundError):
        place.run()
    place.meddling = lambda silo, frame: frame
    place.run()
    assert [events_of(place.path / silo) for silo in updates()] == [2] * SILOS


def test_neither_the_server_nor_its_folder_has_a_single_silos_numbers(tmp_path: Path) -> None:
    place = SecureDeployment(tmp_path, replace(MOMENTS, rounds=1), five())
    run = place.run()
    rows = run.folder.egress()
    assert [(row["masked"], row["blocks"], sorted(row["payloads"])) for row in rows] == [
        (True, {}, ["moments", "records"])
    ] * SILOS
    ring, sent = summed().ring, updates()
    came = {silo: answer for silo, answer in place.answered if answer.header.get("turn") == "masked"}
    for row in rows:
        frame, own = came[row["silo"]], summed().integers(sent[row["silo"]])
        assert (row["sha256"], row["bytes"]) == (frame.sha256, len(own) * 4)
        masked = ring.integers(ring.unpacked(frame.parts["values"]))
        assert (masked == own).mean() < 0.01
        assert own.tobytes() not in b"".join(p.read_bytes() for p in run.folder.path.rglob("*") if p.is_file())
    # The silo's own record of what left is the server's.
    for silo in sent:
        own_rows = (place.path / silo / "runs" / "run-1" / "egress.jsonl").read_text().splitlines()
        assert [json.loads(row) for row in own_rows] == [row for row in rows if row["silo"] == silo]


def test_a_plain_task_gets_nothing_of_shared_noise(tmp_path: Path) -> None:
    """A server that leaves the protocol out would see each silo's numbers with a share of the noise."""

    def plainly(silo: str, frame: Frame) -> Frame:
        return Frame({**frame.header, "kind": TASK}, frame.parts)

    place = SecureDeployment(tmp_path, MOMENTS, five(), meddling=plainly)
    with pytest.raises(ShortRoundError, match="silo 's0' sends nothing but secure sums where silos share noise"):
        place.run()
    assert not list(tmp_path.rglob("ledger.sqlite"))


def test_an_experiment_whose_silos_add_all_their_noise_has_no_secure_sum(tmp_path: Path) -> None:
    def locally(silo: str, frame: Frame) -> Frame:
        text = str(frame.header["experiment"]).replace('trust = "distributed"', 'trust = "local"')
        return Frame({**frame.header, "experiment": text}, frame.parts)

    place = SecureDeployment(tmp_path, MOMENTS, five(), meddling=locally)
    with pytest.raises(ShortRoundError, match=r"a secure sum is for experiments with privacy.trust = 'distributed'"):
        place.run()


def twice(silo: str, frame: Frame) -> Frame:
    """The question for s2's numbers comes again."""
    if silo == "s2" and frame.header.get("turn") == "consent":
        return twice.masked  # type: ignore[attr-defined,no-any-return]
    if silo == "s2" and frame.header.get("turn") == "masked":
        twice.masked = frame  # type: ignore[attr-defined]
    return frame


def test_numbers_are_asked_for_once_and_paid_for_once(tmp_path: Path) -> None:
    place = SecureDeployment(tmp_path, replace(MOMENTS, rounds=1), five(), meddling=twice)
    place.run()
    assert any("silo 's2' is asked for 'masked' after" in reason for reason in place.reasons("refused"))
    assert events_of(place.path / "s2") == 1


def test_a_silo_that_was_started_again_has_dropped_out(tmp_path: Path) -> None:
    place = SecureDeployment(tmp_path, replace(MOMENTS, rounds=1), five())

    def restarted(silo: str, frame: Frame) -> Frame:
        if silo == "s2" and frame.header.get("turn") == "consent":
            place.grid.handlers["s2"].__self__.worker = place.service(2).worker  # type: ignore[attr-defined]
        return frame

    place.meddling = restarted
    place.run()
    assert place.reasons("refused") == ["silo 's2' is in no secure sum: it was started again since"]


def granting(known: Mapping[str, str]) -> object:
    return lambda *_: Grant(math.inf, repeatable=True, silos=known)


@pytest.mark.parametrize(
    ("known", "complaint"),
    [
        ({}, "silo 's1' does not agree: policy.toml names no key of silo 's0'"),
        (dict.fromkeys(fingerprints(["s0"]), "other"), "silo 's1' knows silo 's0' by another key than the server's"),
    ],
)
def test_silos_share_noise_with_those_alone_whose_keys_they_know(
    known: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    """A server that made up silos, or keys for them, would be the one that unmasks."""
    place = SecureDeployment(tmp_path, MOMENTS, five(), agreement=granting(known))  # type: ignore[arg-type]
    with pytest.raises(ShortRoundError, match=complaint):
        place.run()


def test_a_server_that_leaves_silos_out_unmasks_nothing(tmp_path: Path) -> None:
    """Three of five, where one may be missing: the silos themselves count."""

    def without(silo: str, frame: Frame) -> Frame:
        if frame.header.get("turn") != "shares":
            return frame
        return Frame(frame.header, {name: part for name, part in frame.parts.items() if name in ("s0", "s1", silo)})

    place = SecureDeployment(tmp_path, MOMENTS, five(), meddling=without)
    with pytest.raises(ShortRoundError, match="3 of 5 silos sent keys; 4 are needed"):
        place.run()


@pytest.mark.parametrize(("silos", "tolerated"), [(3, 1), (5, 2), (9, 3), (2, 1)])
def test_so_many_colluders_that_two_sums_could_be_taken_are_refused(silos: int, tolerated: int) -> None:
    with pytest.raises(ConfigError, match="must be below a third"):
        threshold_of(silos, tolerated)
    threshold = threshold_of(silos, (silos - 1) // 3)
    assert 2 * threshold > silos + (silos - 1) // 3  # two lists would need more signatures than all and colluders give


def test_what_cannot_be_shared_is_refused_before_anybody_is_asked() -> None:
    federation = remote(five())
    records = {silo.name: len(silo) for silo in five().silos}

    def refused(method: str, known: Mapping[str, int], *overrides: str) -> str:
        config = shared_config(method, *overrides)
        with pytest.raises(ConfigError) as told:
            check_shared(config, federation, Experiment.of(config, federation).method, known)
        return str(told.value)

    assert "those of 's0' are not declared" in refused("moments", {})
    assert "must be below a third" in refused("moments", records, "privacy.tolerated=2")
    assert "silos are absent from some rounds" in refused("moments", records, "participation.rate=0.5")
    assert "privacy.bits = 16 leaves" in refused("moments", records, "privacy.bits=16")
    config = shared_config("refined_moments")
    check_shared(config, federation, Experiment.of(config, federation).method, records)


def test_a_key_signs_words_of_secure_sums_and_no_others() -> None:
    asked = Asked("run", 1, "ab", Turn.KEYS)
    with pytest.raises(FedloomError, match="words signed that belong to no secure sum"):
        words_to_sign(asked.answered({"signature": b"a statement"}))
    words = b"fedloom secure sum keys"
    assert words_to_sign(asked.answered({"signature": words})) == words
    assert words_to_sign(Frame({"kind": "update"}, {"signature": words})) == b""
    assert signed(asked.answered({"signature": words, "keys": b"k"}), b"s").parts == {"signature": b"s", "keys": b"k"}
