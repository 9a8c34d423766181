"""What one silo asks of a hub costs no more where there are many silos."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.deployment.charter import Charter
from fedloom.deployment.direct.letters import Letter
from fedloom.deployment.direct.mailbox import Mailbox
from fedloom.deployment.direct.register import Register, _peer
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rules import RoundRules

SILOS = ("north", "south", "west")


def test_whether_a_silo_may_call_is_read_from_its_own_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charter = Charter(name="x", address="127.0.0.1:1", silos=dict.fromkeys(SILOS, "all"), shape=(1,))
    server = ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())
    for silo in SILOS:
        home = SiloDirectory.create(tmp_path / silo, Invitation.read(server.invitation(silo)))
        server.admit(home.public_key)
    peer = _peer(server.certificate("south").read_bytes())
    read, reading = list[str](), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or reading(path))
    Register(server).check(peer)
    assert read == ["south.pub"]


def test_of_many_orders_the_answers_that_are_here_are_found_at_once(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path / "mailbox.sqlite")
    orders = [Letter.order(silo, Frame({"kind": "task", "round": 1}), 10) for silo in SILOS]
    for silo, letter in zip(SILOS, orders, strict=True):
        mailbox.put(silo, "run-1", 1, letter)
    numbers = [letter.number for letter in orders]
    assert mailbox.answers(numbers) == []
    told = [letter.answer(Frame({"kind": "update", "from": silo})) for silo, letter in zip(SILOS, orders, strict=True)]
    for answer in told[:2]:
        assert mailbox.answer(answer)
    assert mailbox.answers(numbers) == told[:2]
    assert mailbox.answers(numbers[1:]) == told[1:2]
    mailbox.done(*numbers[:2])
    assert [mailbox.state(number)[0] for number in numbers] == ["done", "done", "open"]  # type: ignore[index]
    assert mailbox.answers(numbers) == told[:2]  # for a run that goes on in the place of one that died
    mailbox.close()
