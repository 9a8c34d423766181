"""A silo's half of a secure sum passes by nothing that guards its records: audit log, ledger, hold, agreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import Config
from fedloom.engines.base import Result
from fedloom.engines.remote.assignments import Assignment
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.grants import Grant
from fedloom.engines.remote.rounds import ShortRoundError
from fedloom.engines.remote.secure_frames import SECURE
from fedloom.engines.remote.secure_silo import SecureSiloService
from fedloom.engines.remote.work import FAILED, REFUSED, RefusedError
from fedloom.methods.base import Method
from fedloom.operations.spending import Hold
from fedloom.operations.trail import AUDIT, Trail
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.silo_privacy import SiloPrivacy
from secure_deployment import SecureDeployment, fingerprints, five, shared_config

STEP = ("rounds=2", "local.steps=1", "local.optimizer=sgd", "local.learning_rate=0.5", "sharing.weights=equal")
CONFIG = shared_config("linear_head", *STEP)
SILO = "s1"


@dataclass
class Obstructed:
    """A deployment in which something comes in the way of s1 before it is asked a turn of the second round."""

    path: Path
    turn: str = ""
    obstruct: Callable[[Obstructed], None] = lambda _: None
    epsilon: float = 2.0  # that s1 is granted
    agreed: bool = True
    computed: list[int] = field(default_factory=list)  # rounds for which s1 has looked at its records

    def __post_init__(self) -> None:
        self.place = SecureDeployment(
            self.path, CONFIG, five(), agreement=self._agree, meddling=self._meddle, repeatable=False
        )

    @property
    def home(self) -> Path:
        return self.path / SILO

    @property
    def events(self) -> int:
        return len(read_accounts(self.home / "ledger.sqlite")[0].events)

    def _agree(self, _: Config, __: Method, plan: SiloPrivacy | None) -> Grant:
        own = plan is not None and plan.silo == SILO
        if own and not self.agreed:
            raise RefusedError("it does not agree any more")
        return Grant(self.epsilon if own else 2.0, 1e-5, silos=fingerprints([silo.name for silo in five().silos]))

    def _meddle(self, silo: str, frame: Frame) -> Frame:
        header = frame.header
        if (silo, frame.kind, header["round"], header.get("turn")) == (SILO, SECURE, 2, self.turn):
            self.obstruct(self)
        return frame

    def run(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        honest = SecureSiloService._trained

        def trained(service: SecureSiloService, assignment: Assignment) -> Result:
            if service._silo.name == SILO:
                self.computed.append(assignment.order.context.round)
                assert self.events == len(self.computed)  # paid before records are looked at
                lines = [entry.event for entry in Trail(self.home / AUDIT).entries()]
                assert lines.count("paid") == len(self.computed)
            return honest(service, assignment)

        monkeypatch.setattr(SecureSiloService, "_trained", trained)
        return self.place.run()


def test_the_audit_log_has_every_turn_and_the_payment_before_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstructed = Obstructed(tmp_path)
    obstructed.run(monkeypatch)
    lines = [(e.event, e.facts.get("turn", ""), e.facts) for e in Trail(obstructed.home / AUDIT).entries()]
    of_a_round = [
        *(("asked", "keys"), ("approved", ""), ("sent", "keys"), ("asked", "shares"), ("sent", "shares")),
        *(("asked", "masked"), ("approved", ""), ("paid", ""), ("sent", "masked")),
        *(("asked", "consent"), ("sent", "consent"), ("asked", "reveal"), ("sent", "reveal")),
    ]
    assert [(event, turn) for event, turn, _ in lines] == 2 * of_a_round
    left = [f.sha256 for silo, f in obstructed.place.answered if (silo, f.header["turn"]) == (SILO, "masked")]
    assert [facts["sha256"] for event, turn, facts in lines if (event, turn) == ("sent", "masked")] == left
    (account,) = read_accounts(obstructed.home / "ledger.sqlite")
    assert [type(event) for event in account.events] == [Gaussian, Gaussian]


def held(obstructed: Obstructed) -> None:
    Hold("ticket", "yesterday", 0, "").write(obstructed.home)


def spent(obstructed: Obstructed) -> None:
    obstructed.epsilon = 0.9  # of a round; two cost 1


def disagreed(obstructed: Obstructed) -> None:
    obstructed.agreed = False


def lost(obstructed: Obstructed) -> None:
    (obstructed.home / "ledger.sqlite").unlink()


def without_log(obstructed: Obstructed) -> None:
    (obstructed.home / AUDIT).rename(obstructed.home / "elsewhere")
    (obstructed.home / AUDIT).mkdir()


@pytest.mark.parametrize("turn", ["keys", "masked"])
@pytest.mark.parametrize("obstruct", [held, spent, disagreed, lost, without_log])
def test_nothing_of_a_silos_records_is_looked_at_or_leaves(
    obstruct: Callable[[Obstructed], None], turn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstructed = Obstructed(tmp_path, turn, obstruct)
    run = obstructed.run(monkeypatch)  # the other four go on without it
    assert [row["participants"] for row in run.metrics()] == [[0, 1, 2, 3, 4], [0, 2, 3, 4]]
    assert obstructed.computed == [1]
    (last,) = [f for silo, f in obstructed.place.answered if silo == SILO and f.kind != SECURE]
    assert last.kind == (FAILED if obstruct is without_log else REFUSED)
    assert obstruct is lost or obstructed.events == 1
    paid = [row["round"] for row in run.folder.egress() if row["silo"] == SILO]
    assert paid == [1]


def test_who_cannot_pay_says_so_before_others_have_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of five silos that cannot pay the sum is given up, and no other has paid for it."""
    place = SecureDeployment(tmp_path, CONFIG, five(), repeatable=False)
    for name in ("s1", "s4"):
        Hold("ticket", "yesterday", 0, "").write(tmp_path / name)
    with pytest.raises(ShortRoundError, match="3 of 5 silos sent keys; 4 are needed"):
        place.run()
    for name in ("s0", "s2", "s3"):
        assert read_accounts(tmp_path / name / "ledger.sqlite")[0].events == ()
