"""A federation by Flower's SuperLink, with TLS, keys and the proxy: the same result, and nobody else comes in."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedloom.deployment.demo import settle
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.flower_serving import FlowerServing
from fedloom.deployment.joining import Joining
from fedloom.deployment.keys import make_server_certificate
from fedloom.errors import FedloomError
from fedloom.federation.building import build_federation
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import METHODS, POLICY, RULES, Place, config_of, halted, pid
from support import wait_for

pytestmark = pytest.mark.system


def test_through_the_superlink_silos_learn_what_the_reference_engine_learns(flower_place: Place) -> None:
    flower_place.run("flower", *METHODS["fissionvae-d"])
    assert flower_place.same("flower")


def test_a_superlink_that_is_killed_takes_its_run_along_which_is_resumed(flower_place: Place) -> None:
    """In its second round, which cannot be over before: one silo halts with its answer in hand."""
    name, silo = "superlink-killed", flower_place.joined[0]

    def kill() -> None:
        os.killpg(pid(flower_place.serving.superlink), signal.SIGKILL)
        os.kill(pid(silo.worker), signal.SIGCONT)

    with flower_place.dishonest(silo, (2, "halted")):
        killed = flower_place.when(lambda: halted(silo.worker), kill)
        with pytest.raises(FedloomError, match="the run's process at the server has ended"):
            flower_place.run(name, *METHODS["fissionvae-d"])
        killed.join()
        assert RunFolder.open(flower_place.folder / name).rounds_done == 1
        flower_place.wait_until_all_are_there()
        flower_place.resume(name)
    assert flower_place.same(name)


def status(flower_place: Place, path: str, port: int) -> int:
    """Of the answer to a call without a key."""
    context = ssl.create_default_context(cafile=str(flower_place.place.server.keys / "ca.crt"))
    headers = {"Content-Type": "application/protobuf"}
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_no_port_leads_to_the_controls(flower_place: Place) -> None:
    outside, inside = flower_place.place.server.charter.port, flower_place.place.server.settings.port
    for port in (outside, inside):
        for call in ("control/list-runs", "control/start-run", "control/register-node", "runtime/acquire-task"):
            assert status(flower_place, f"/v1/{call}", port) == 404
        assert status(flower_place, "/docs", port) == 404
        assert status(flower_place, "/v1/fleet/register-node", port) == 404
        assert status(flower_place, "/v1/fleet/pull-messages", port) == 401  # who calls must show a key


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_the_machine_has_no_door(flower_place: Place) -> None:
    """Silos listen nowhere; the SuperLink's control is a socket in a folder that others cannot enter."""
    socket = flower_place.place.server.door.socket
    assert socket is not None
    knock = f"import os, socket; {{}} socket.socket(socket.AF_UNIX).connect({str(socket)!r})"
    subprocess.run([sys.executable, "-c", knock.format("")], check=True)  # its owner can
    other = knock.format("os.setgroups([]); os.setgid(65534); os.setuid(65534);")
    nobody = subprocess.run([sys.executable, "-c", other], capture_output=True, check=False)
    assert b"PermissionError" in nobody.stderr
    for silo in flower_place.joined:
        for child in (silo.worker, silo.node):
            assert listening(pid(child)) == []
    assert listening(pid(flower_place.serving.executor)) == []
    assert listening(pid(flower_place.serving.superlink)) == [flower_place.place.server.settings.port]


def listening(process: int) -> list[int]:
    """The ports at which a process takes connections."""
    own = {str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                ports.append(int(columns[1].rpartition(":")[2], 16))
    return ports


BODY, BODIES = 60 * 2**20, 12


def test_nothing_is_kept_of_what_a_peer_without_a_key_sends(flower_place: Place) -> None:
    """Twelve bodies of 60 MB, by the proxy's door and by the SuperLink's own; 720 MB would show."""
    server = flower_place.place.server
    context = ssl.create_default_context(cafile=str(server.keys / "ca.crt"))
    before, highest = memory(flower_place), 0

    def send(port: int) -> None:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        with contextlib.suppress(OSError, http.client.HTTPException):  # it hangs up in the midst of it
            connection.putrequest("POST", "/v1/fleet/push-object")
            connection.putheader("Content-Type", "application/protobuf")
            connection.putheader("Content-Length", str(BODY))
            connection.endheaders()
            for _ in range(BODY // 2**20):
                connection.send(bytes(2**20))

    for port in (server.charter.port, server.settings.port):
        senders = [threading.Thread(target=send, args=(port,)) for _ in range(BODIES)]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            highest = max(highest, memory(flower_place))
            time.sleep(0.05)
    assert highest - before < 60 * 2**20


def memory(flower_place: Place) -> int:
    """Bytes of the SuperLink and the proxy with its workers."""
    found = 0
    for child in flower_place.serving.household.children:
        if child.name in ("superlink", "proxy"):
            number = pid(child)
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            for each in (str(number), *children):
                (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{each}/status").read_text())
                found += 1024 * int(line)
    return found


def test_a_server_that_is_started_again_takes_its_register_from_what_is_admitted(tmp_path: Path) -> None:
    config = config_of()
    found = settle(tmp_path, build_federation(config.data, Streams(config.seed)), POLICY, RULES, wire="flower")
    key, said = found.server.admitted / "mnist-1.pub", list[str]()
    with FlowerServing(found.server, said.append, proxy=False) as serving:
        assert said == [f"silo '{home.name}' may join" for home in found.silos]
        said.clear()
        line = key.read_bytes()
        key.unlink()
        serving.tend()
        assert said == ["silo 'mnist-1' may no longer join with the key that it had"]
        key.write_bytes(line)
        serving.tend()
        assert said[1:] == [
            "silo 'mnist-1' cannot join with a key that was taken back, or is another's: enroll it anew"
        ]
        statuses = {node.silo: node.status for node in serving.control.nodes()}
        expected = {home.name: "unregistered" if home.name == "mnist-1" else "registered" for home in found.silos}
        assert statuses == expected
        key.unlink()
        said.clear()
    with FlowerServing(found.server, said.append, proxy=False) as serving:
        assert said == [f"silo '{home.name}' may join" for home in found.silos if home.name != "mnist-1"]


def test_a_silo_joins_once(flower_place: Place, tmp_path: Path) -> None:
    silo = flower_place.joined[0]
    with (
        pytest.raises(FedloomError, match=f"silo '{silo.home.name}' has joined already"),
        Joining(silo.home, silo.data, flower_place.said.append),
    ):
        pass
    copy = tmp_path / "copy"
    shutil.copytree(silo.home.path, copy)
    assert "does not let this silo in" in refusal(SiloDirectory.open(copy), silo.data)
    flower_place.run("joined-twice", *METHODS["fissionvae-d"])
    assert flower_place.same("joined-twice")


def test_a_key_that_was_not_admitted_is_turned_away(flower_place: Place, tmp_path: Path) -> None:
    invitation = Invitation.read(
        flower_place.place.server.path / "invitations" / f"{flower_place.joined[0].home.name}.toml"
    )
    stranger = SiloDirectory.create(tmp_path / "stranger", invitation)
    assert "the server does not let this silo in: its key is not admitted" in refusal(
        stranger, flower_place.joined[0].data
    )


def test_a_server_of_another_authority_is_not_trusted(flower_place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(flower_place.joined[0].home.path, copy)
    other = settle(tmp_path / "other", flower_place.federation, POLICY, RULES, wire="flower", proxy=True)
    shutil.copy(other.server.keys / "ca.crt", copy / "ca.crt")
    assert "certificate is not one of this federation, or has expired" in refusal(
        SiloDirectory.open(copy), flower_place.joined[0].data
    )


def test_an_expired_certificate_keeps_silos_away_until_it_is_renewed(flower_place: Place, tmp_path: Path) -> None:
    keys, copy = flower_place.place.server.keys, tmp_path / "copy"
    shutil.copytree(flower_place.joined[0].home.path, copy)
    proxy = flower_place.serving.household.children[-1]
    assert proxy.name == "proxy"
    address = "127.0.0.1", flower_place.place.server.charter.port
    make_server_certificate(keys, "127.0.0.1", days=-1)
    expired = (keys / "server.crt").read_text().split()
    os.kill(pid(proxy), signal.SIGHUP)  # nginx reads its files again, in its own time
    try:
        wait_for(lambda: ssl.get_server_certificate(address).split() == expired, "the proxy shows the expired one")
        assert "has expired" in refusal(SiloDirectory.open(copy), flower_place.joined[0].data)
    finally:
        make_server_certificate(keys, "127.0.0.1")
        os.kill(pid(proxy), signal.SIGHUP)
    flower_place.wait_until_all_are_there()
    flower_place.run("renewed", *METHODS["fissionvae-d"])  # nodes that have met it give up, and are started again
    assert flower_place.same("renewed")


def refusal(home: SiloDirectory, data: Path) -> str:
    """What a silo says that cannot join."""
    said: list[str] = []

    def told(joining: Joining) -> bool:
        joining.tend()
        return any(line.startswith("node") for line in said)

    with Joining(home, data, said.append) as joining:
        wait_for(lambda: told(joining), "the silo says that it cannot join")
        return "\n".join([*said, joining.node.last_words(5)])
