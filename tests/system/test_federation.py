"""A federation of separate processes on the direct wire: the same result, and nobody else comes in."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedloom.deployment.demo import settle
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.deployment.keys import make_server_certificate, make_silo_certificate, read_public_key
from fedloom.errors import FedloomError
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.registry import LedgerRegistry
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from places import METHODS, POLICY, RULES, Place, pid, private, refusal
from support import wait_for

pytestmark = pytest.mark.system
FISSION = METHODS["fissionvae-d"]


@pytest.mark.parametrize("name", METHODS)
def test_separate_processes_learn_what_the_reference_engine_learns(place: Place, name: str) -> None:
    with place.agreeing(private(8.0, "test") if name == "dp-sgd" else POLICY):
        run = place.run(name, *METHODS[name])
        assert place.same(name)
        assert RunFolder.open(run).status["state"] == "finished"
        assert not (run / "ledger.sqlite").exists()
        rows = read_lines(run / "metrics.jsonl")
        assert all("train/" not in key for row in rows for key in row if "server" not in key)
        if name == "dp-sgd":
            reference = read_accounts(place.folder / f"{name}-reference/ledger.sqlite")
            theirs = {account.silo: account for account in reference}
            for home in place.place.silos:
                (ours,) = read_accounts(home.path / "ledger.sqlite")
                assert ours.spent == math.inf  # noise for tests protects nothing
                assert [(each.name, each.charges) for each in ours.releases] == [("update", 2)]
                assert theirs[home.name].spent > 0
            with contextlib.closing(LedgerRegistry(place.place.registry)) as registry:
                known = {(entry.silo, entry.path, entry.charges) for entry in registry.entries()}
            assert known == {(home.name, home.path / "ledger.sqlite", 2) for home in place.place.silos}


def test_records_that_do_not_fit_are_told_to_the_silo_alone(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    np.savez(tmp_path / "other.npz", x_train=np.zeros((4, 5, 5), np.uint8))
    with Joining(SiloDirectory.open(copy), tmp_path / "other.npz", place.said.append) as joining:
        assert joining.worker.process is not None
        joining.worker.process.wait(150)
        with pytest.raises(FedloomError, match=r"^'other' holds records of shape \(1, 5, 5\), the charter says"):
            joining.tend()


def test_one_process_does_for_a_silo_without_walls(place: Place) -> None:
    """Where bubblewrap cannot be had, worker and node are one, which takes part as the others do."""
    silo = place.joined[0]
    for child in silo.household.children:
        child.signal(9)
    silo.household.children.clear()
    alone = Joining(silo.home, silo.data, place.said.append, place.place.registry, apart=False)
    alone._lock, alone._runtime = silo._lock, silo._runtime
    alone.worker = alone.node = alone.household.add(alone._silo())
    place.joined[0] = alone
    try:
        wait_for(lambda: "INFO connected" in alone.node.last_words(50), "it is connected")
        place.run("one-process", *FISSION)
        assert place.same("one-process")
    finally:
        alone.household.stop()
        place.joined[0] = silo
        silo.worker, silo.node = silo.household.add(silo._worker()), silo.household.add(silo._node())
        place.wait_until_all_are_there()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_the_machine_has_no_door(place: Place) -> None:
    """Silos listen nowhere; runs are handed in at a socket in a folder that others cannot enter."""
    door = place.place.server.door.socket
    assert door is not None
    knock = f"import os, socket; {{}} socket.socket(socket.AF_UNIX).connect({str(door)!r})"
    subprocess.run([sys.executable, "-c", knock.format("")], check=True)  # its owner can
    other = knock.format("os.setgroups([]); os.setgid(65534); os.setuid(65534);")
    nobody = subprocess.run([sys.executable, "-c", other], capture_output=True, check=False)
    assert b"PermissionError" in nobody.stderr
    for silo in place.joined:
        for child in (silo.worker, silo.node):
            assert listening(pid(child)) == []
    assert listening(pid(place.serving.executor)) == []
    assert listening(pid(place.serving.hub)) == [place.place.server.charter.port]


def listening(process: int) -> list[int]:
    """The ports at which a process takes connections."""
    own = {str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()}
    ports = set[int]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return sorted(ports)


def test_nothing_is_kept_of_what_a_peer_without_a_certificate_sends(place: Place) -> None:
    """Twelve of them send as much as they can: TLS ends before a byte of it is read."""
    address = ("127.0.0.1", place.place.server.charter.port)
    before, highest, sent = memory(place), 0, list[int]()

    def send() -> None:
        context = ssl.create_default_context(cafile=str(place.place.server.keys / "ca.crt"))
        context.set_alpn_protocols(["h2"])
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(
                socket.create_connection(address, timeout=20), server_hostname="127.0.0.1"
            ) as connection,
        ):
            for _ in range(60):
                connection.sendall(bytes(2**20))
                sent.append(1)

    senders = [threading.Thread(target=send) for _ in range(12)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        highest = max(highest, memory(place))
        time.sleep(0.05)
    assert highest - before < 30 * 2**20
    assert len(sent) < 60


def memory(place: Place) -> int:
    """Bytes of the hub."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid(place.serving.hub)}/status").read_text())
    return 1024 * int(line)


def test_a_silo_joins_once(place: Place, tmp_path: Path) -> None:
    silo = place.joined[0]
    with (
        pytest.raises(FedloomError, match=f"silo '{silo.home.name}' has joined already"),
        Joining(silo.home, silo.data, place.said.append),
    ):
        pass
    copy = tmp_path / "copy"
    shutil.copytree(silo.home.path, copy)
    assert "has joined already, by another process" in refusal(SiloDirectory.open(copy), silo.data)
    place.run("joined-twice", *FISSION)
    assert place.same("joined-twice")


def test_who_has_an_invitation_waits_to_be_admitted(place: Place, tmp_path: Path) -> None:
    """A silo that is admitted already keeps its place: an invitation in other hands opens nothing."""
    silo = place.joined[0]
    stranger = SiloDirectory.create(
        tmp_path / "stranger", Invitation.read(place.place.server.invitation(silo.home.name))
    )
    assert f"silo '{silo.home.name}' has another key: its coordinator must invite it anew" in refusal(
        stranger, silo.data
    )


def test_a_silo_that_is_revoked_is_away_at_once_and_comes_back_admitted(place: Place) -> None:
    server, silo = place.place.server, place.joined[2]
    key = silo.home.public_key
    there = place.serving.home.keys_admitted
    server.revoke(silo.home.name)
    try:
        wait_for(lambda: any("is not admitted with this key" in line for line in place.said), "it is told", 20)
        assert silo.home.name not in there()
    finally:
        server.admit(key)
    place.wait_until_all_are_there()


def test_a_server_of_another_authority_is_not_trusted(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    other = settle(tmp_path / "other", place.federation, POLICY, RULES)
    shutil.copy(other.server.keys / "ca.crt", copy / "ca.crt")
    assert "certificate is not one of this federation, or has expired" in refusal(
        SiloDirectory.open(copy), place.joined[0].data
    )


def test_an_expired_certificate_of_a_silo_opens_nothing(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    home = SiloDirectory.open(copy)
    line = read_public_key(home.public_key)[1]
    expired = make_silo_certificate(place.place.server.keys, home.name, line, days=-1)
    home.certificate.write_bytes(expired)
    place.place.server.invite(home.name)  # the code of the invitation that it has is worth nothing either
    assert "its certificate has expired: ask the coordinator for another invitation" in refusal(
        home, place.joined[0].data
    )


def test_an_expired_certificate_of_the_server_keeps_silos_away_until_it_is_renewed(place: Place) -> None:
    keys = place.place.server.keys
    try:
        make_server_certificate(keys, "127.0.0.1", days=-1)
        os.kill(pid(place.serving.hub), 9)
        wait_for(lambda: any("or has expired" in line for line in place.said), "a silo says so", 30)
    finally:
        make_server_certificate(keys, "127.0.0.1")
        os.kill(pid(place.serving.hub), 9)
    place.wait_until_all_are_there()
    place.run("renewed", *FISSION)
    assert place.same("renewed")
