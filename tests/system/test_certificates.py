"""Certificates of silos that end: renewed in time nothing happens, and else there is a way back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fedloom.deployment.direct.conductor import DirectConductor
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.deployment.keys import make_silo_certificate, read_public_key
from fedloom.runs.files import read_lines, write_atomically
from places import METHODS, Place, pid, refusal
from support import wait_for

pytestmark = pytest.mark.system
SECONDS = 90.0  # that a certificate holds: enough for a run to begin meanwhile
FISSION = METHODS["fissionvae-d"]


def ends(path: Path) -> datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def given(place: Place, silo: Joining, seconds: float) -> bytes:
    """Let a silo have nothing but a certificate that ends so soon, and use it."""
    server, home = place.place.server, silo.home
    line = read_public_key(home.public_key)[1]
    short = make_silo_certificate(server.keys, home.name, line, days=seconds / 86400)
    for path in (server.certificate(home.name), home.certificate):
        write_atomically(path, short)
    os.kill(pid(silo.node), 9)
    return short


def test_a_certificate_that_ends_soon_is_renewed_in_mid_run_and_the_old_one_opens_nothing(
    place: Place, tmp_path: Path
) -> None:
    server, silo = place.place.server, place.joined[1]
    place.said.clear()
    short = given(place, silo, SECONDS)
    end = ends(silo.home.certificate)
    wait_for(lambda: any("its certificate expires in 0 days" in line for line in place.said), "it is told")
    place.wait_until_all_are_there()

    def renewed() -> None:
        """As its coordinator does it; every silo asks for its new one when it connects the next time."""
        subprocess.run([sys.executable, "-m", "fedloom", "federation", "renew", str(server.path)], check=True)
        os.kill(pid(place.serving.hub), 9)

    metrics = place.folder / "outliving" / "metrics.jsonl"
    renewing = place.when(lambda: metrics.is_file() and len(read_lines(metrics)) > 0, renewed)
    place.run("outliving", *FISSION, "rounds=3")
    renewing.join()
    place.wait_until_all_are_there()
    assert ends(silo.home.certificate) > datetime.now(UTC) + timedelta(days=300)
    assert place.same("outliving")
    assert not place.events("outliving", "missing")

    time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds() + 1))
    copy = tmp_path / "copy"
    shutil.copytree(silo.home.path, copy)
    old = SiloDirectory.open(copy)
    old.certificate.write_bytes(short)
    server.invite(silo.home.name)  # the copy's code is worth nothing either
    assert "its certificate has expired: ask the coordinator for another invitation" in refusal(old, silo.data)
    place.run("after", *FISSION)
    assert place.same("after")
    assert not place.events("after", "missing")


def test_a_silo_whose_certificate_has_ended_comes_back_by_another_invitation(place: Place) -> None:
    server, silo = place.place.server, place.joined[2]
    server.invite(silo.home.name)  # so that the code which it has is worth nothing
    place.said.clear()
    given(place, silo, -60.0)
    wait_for(lambda: any("join with that" in line for line in place.said), "it is told")
    online = {name for name, known in DirectConductor(server).silos().items() if known["there"] == "online"}
    assert online == {other.home.name for other in place.joined} - {silo.home.name}
    silo.home.invited(Invitation.read(server.invite(silo.home.name)))
    os.kill(pid(silo.node), 9)
    place.wait_until_all_are_there()
    place.run("back", *FISSION)
    assert place.same("back")
    assert not place.events("back", "missing")
