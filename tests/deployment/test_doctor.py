"""The doctor: each thing that can be wrong is one line with what to do about it, and an exit code."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from fedloom.deployment import doctor
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.doctor import Diagnosis, Patient, examine, exit_code
from fedloom.deployment.keys import make_authority, make_server_certificate
from fedloom.deployment.processes import free_port
from fedloom.engines.remote.rules import RoundRules
from fedloom.operations import trail
from fedloom.operations.spending import Hold
from fedloom.operations.trail import AUDIT, Trail
from fedloom.privacy.ledger import Ledger

AGREED = 'methods = ["fedvae"]\nblocks = ["decoder"]\n'


@pytest.fixture
def server(tmp_path: Path) -> ServerDirectory:
    address = f"127.0.0.1:{free_port()}"
    charter = Charter(name="lungs", address=address, silos={"north": "all"}, shape=(3,), modality="vector")
    return ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())


@pytest.fixture
def patient(server: ServerDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patient]:
    """A silo that nothing ails."""
    silo = SiloDirectory.create(
        server.path.parent / "silo", Invitation.read(server.path / "invitations" / "north.toml")
    )
    server.admit(silo.public_key)
    (silo.path / "policy.toml").write_text(AGREED)
    data = server.path.parent / "records.npz"
    rng = np.random.default_rng(0)
    arrays = {f"x_{split}": rng.random((20, 3), dtype=np.float32) for split in ("train", "test")}
    np.savez(data, modality=np.array("vector"), **arrays)  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "bubblewrap", lambda: "bwrap")
    monkeypatch.setattr(doctor, "_output", lambda *_: "yes")
    monkeypatch.setattr(doctor, "ROOM", 0)
    with served(server.keys, server.charter.port):
        yield Patient(silo, data)


@contextmanager
def served(keys: Path, port: int) -> Iterator[None]:
    """Somebody who shows the server's certificate, and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def lines(patient: Patient) -> dict[str, Diagnosis]:
    """The worst of each."""
    return {each.about: each for each in sorted(examine(patient), key=lambda each: exit_code([each]))}


def test_nothing_ails_a_silo_that_is_set_up(patient: Patient) -> None:
    found = examine(patient)
    assert [each for each in found if each.level != "ok"] == []
    assert exit_code(found) == 0
    assert lines(patient)["data"].said == "20 records as the charter declares them"
    assert "answers with the federation's certificate" in lines(patient)["server"].said


def test_nothing_ails_the_server(patient: Patient, server: ServerDirectory) -> None:
    assert [each for each in examine(Patient(server)) if each.level != "ok"] == []


def path_of(patient: Patient, name: str) -> Path:
    return patient.home.path / name


def key_for_all(patient: Patient) -> None:
    path_of(patient, "node.key").chmod(0o644)


def no_key(patient: Patient) -> None:
    path_of(patient, "node.key").unlink()


def no_agreement(patient: Patient) -> None:
    path_of(patient, "policy.toml").write_text("")


def bad_policy(patient: Patient) -> None:
    path_of(patient, "policy.toml").write_text("method = 3")


def no_privacy(patient: Patient) -> None:
    path_of(patient, "policy.toml").write_text(AGREED + 'privacy = "none"\n')


def other_data(patient: Patient) -> None:
    assert patient.data is not None
    np.savez(patient.data, modality=np.array("vector"), x_train=np.zeros((2, 4)), x_test=np.zeros((2, 4)))


def no_data(patient: Patient) -> None:
    assert patient.data is not None
    patient.data.unlink()


def held(patient: Patient) -> None:
    Hold("ticket", "", 0, "").write(patient.home.path)


def old_ledger(patient: Patient) -> None:
    ledger = Ledger(path_of(patient, "ledger.sqlite"))
    facts = {"ledger": ledger.identity, "charge": 1, "head": "0"}
    ledger.close()
    Trail(path_of(patient, AUDIT)).note("paid", facts)


def changed_log(patient: Patient) -> None:
    log = Trail(path_of(patient, AUDIT))
    log.note("asked", {"round": 1})
    log.path.write_bytes(log.path.read_bytes().replace(b'"round":1', b'"round":2'))


def ending_certificate(patient: Patient) -> None:
    make_server_certificate(path_of(patient, "../server/keys"), "127.0.0.1", 20)
    path_of(patient, "server.crt").write_bytes(path_of(patient, "../server/keys/server.crt").read_bytes())


def ended_certificate(patient: Patient) -> None:
    make_server_certificate(path_of(patient, "../server/keys"), "127.0.0.1", -1)
    path_of(patient, "server.crt").write_bytes(path_of(patient, "../server/keys/server.crt").read_bytes())


def another_authority(patient: Patient) -> None:
    other = path_of(patient, "../other")
    other.mkdir()
    make_authority(other, "other")
    path_of(patient, "ca.crt").write_bytes((other / "ca.crt").read_bytes())


AILMENTS: list[tuple[Callable[[Patient], None], str, str, str]] = [
    (key_for_all, "keys", "fail", "can be read by others"),
    (no_key, "keys", "fail", "there is no private key"),
    (no_agreement, "policy", "warn", "it agrees to nothing"),
    (bad_policy, "policy", "fail", "unknown"),
    (no_privacy, "policy", "warn", "it asks for no privacy"),
    (other_data, "data", "fail", "holds records of shape (4,), the charter says (3,)"),
    (no_data, "data", "fail", "records.npz"),
    (held, "ledger", "fail", "was restored from a backup"),
    (old_ledger, "ledger", "fail", "is older than its audit log"),
    (changed_log, "audit log", "fail", "line 1 was changed after it was written"),
    (ending_certificate, "certificates", "warn", "server.crt expires in 19 days"),
    (ended_certificate, "certificates", "fail", "server.crt expired on"),
    (another_authority, "server", "fail", "is not this federation's"),
]


@pytest.mark.parametrize(("harm", "about", "level", "said"), AILMENTS, ids=lambda each: getattr(each, "__name__", ""))
def test_the_doctor_says_what_is_wrong_and_what_to_do(
    patient: Patient, harm: Callable[[Patient], None], about: str, level: str, said: str
) -> None:
    harm(patient)
    found = lines(patient)[about]
    assert (found.level, said in found.said, bool(found.remedy)) == (level, True, True), found
    assert exit_code(examine(patient)) == {"warn": 1, "fail": 2}[level]


def test_a_server_that_does_not_answer_is_told_from_one_that_is_another(patient: Patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    path = path_of(patient, "silo.toml")
    path.write_text(path.read_text().replace(str(patient.charter.port), str(port)))
    found = lines(Patient(SiloDirectory.open(patient.home.path), patient.data))["server"]
    assert (found.level, "does not answer" in found.said) == ("fail", True)


def test_a_clock_that_was_put_back_shows(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr(trail, "now", lambda: later.isoformat())
    Trail(path_of(patient, AUDIT)).note("asked")
    assert lines(patient)["clock"].level == "fail"


def test_what_nobody_could_look_at_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "bubblewrap", lambda: "")
    monkeypatch.setattr(doctor, "CONTAINER", ())
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(doctor, "_output", lambda *_: "no")
    monkeypatch.setattr(doctor, "ROOM", 2**70)
    found = lines(Patient(patient.home))
    assert {about for about, each in found.items() if each.level == "warn"} == {"clock", "confinement", "data", "disk"}
    monkeypatch.setattr(doctor, "LEAST", 2**70)
    assert lines(patient)["disk"].level == "fail"


def test_a_package_that_is_missing_or_old_is_named(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["fedloom-nowhere>=1", "numpy>=999", "torch; extra == 'other'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: asked)
    said = [each.said for each in examine(patient) if each.about == "versions" and each.level == "fail"]
    assert said[0] == "the package fedloom-nowhere is missing"
    assert "and numpy>=999 is needed" in said[1]
    assert len(said) == 2
