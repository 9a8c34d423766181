"""``fedloom federation``: from an invitation to an admitted key, and the mistakes on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from cryptography import x509

from fedloom.config import Config, load_config
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.engines.remote.rules import RoundRules
from fedloom.runs.folder import RunFolder
from fedloom.settings import parse

Command = Callable[..., Result]
INIT = ("--silos", "ct:north,ct:south,mri:west", "--address", "fed.example.org:8443", "--shape", "1,28,28")


@pytest.fixture
def server(fedloom: Command, tmp_path: Path) -> Path:
    assert fedloom("federation", "init", tmp_path / "lungs", *INIT, "--classes", "well,ill").exit_code == 0
    return tmp_path / "lungs"


def test_from_an_invitation_to_an_admitted_key(fedloom: Command, server: Path, tmp_path: Path) -> None:
    charter = ServerDirectory.open(server).charter
    assert (charter.name, charter.groups, charter.classes) == ("lungs", ("ct", "mri"), ("well", "ill"))
    assert charter.silos == {"north": "ct", "south": "ct", "west": "mri"}
    assert ServerDirectory.open(server).rules == RoundRules()

    enrolled = fedloom("federation", "enroll", server / "invitations" / "south.toml", "--out", tmp_path / "south")
    assert enrolled.exit_code == 0
    key = tmp_path / "south" / "node.pub"
    assert enrolled.stdout.splitlines()[-1] == key.read_text().strip()
    assert str(SiloDirectory.open(tmp_path / "south").invitation.fingerprint) in enrolled.stdout

    admitted = fedloom("federation", "admit", server, key)
    assert admitted.exit_code == 0
    told = [line.split("  ", 1)[1].strip() for line in enrolled.stdout.splitlines() if line.startswith("key")]
    assert told[0] in admitted.stdout  # the fingerprint that two people compare

    found = json.loads(fedloom("federation", "status", server, "--json").stdout)
    assert found["served"] is False
    assert [silo["admitted"] for silo in found["silos"]] == [False, True, False]
    assert "south" in fedloom("federation", "status", server).stdout


def test_declared_records_are_in_the_charter_and_in_every_invitation(fedloom: Command, tmp_path: Path) -> None:
    fedloom("federation", "init", tmp_path / "x", *INIT, "--records", "north=600, south=450,west=7")
    declared = {"north": 600, "south": 450, "west": 7}
    assert ServerDirectory.open(tmp_path / "x").charter.records == declared
    for silo in declared:
        assert Invitation.read(tmp_path / "x" / "invitations" / f"{silo}.toml").charter.records == declared


def test_the_authority_is_told_the_same_on_both_sides(fedloom: Command, tmp_path: Path) -> None:
    founded = fedloom("federation", "init", tmp_path / "x", *INIT).stdout
    enrolled = fedloom("federation", "enroll", tmp_path / "x/invitations/west.toml", "--out", tmp_path / "west").stdout
    (ours,), (theirs,) = (
        [line.split(maxsplit=1)[1][:39] for line in text.splitlines() if line.startswith("authority")]
        for text in (founded, enrolled)
    )
    assert ours == theirs


def test_a_certificate_is_renewed_by_the_same_authority(fedloom: Command, server: Path) -> None:
    keys = ServerDirectory.open(server).keys
    before, authority = (keys / "server.crt").read_bytes(), (keys / "ca.crt").read_bytes()
    assert fedloom("federation", "renew", server).exit_code == 0
    assert (keys / "server.crt").read_bytes() != before
    assert (keys / "ca.crt").read_bytes() == authority
    renewed = x509.load_pem_x509_certificate((keys / "server.crt").read_bytes())
    renewed.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("init", "x", *INIT[:4], "--shape", "1,wide"), "--shape: 'wide' must be a whole number, as in 1,28,28"),
        (("init", "x", *INIT, "--records", "north=600,west=4"), "records declares nothing for silo 'south'"),
        (
            ("init", "x", *INIT, "--records", "north=600,south"),
            "--records: 'south' must be a whole number, as in a=600",
        ),
        (("init", "x", "--silos", "a", "--address", "here", "--shape", "3"), "address = 'here' must be host:port"),
        (("init", "x", "--silos", "A b", *INIT[2:]), "'A b' cannot be the name of a silo or federation"),
        (("enroll", "nothing.toml"), "cannot read nothing.toml: No such file or directory"),
        (("admit", "nothing", "key.pub"), "nothing is not a federation's folder: it holds no federation.toml"),
        (("serve", "nothing"), "nothing is not a federation's folder: it holds no federation.toml"),
        (("status", "nothing"), "nothing is not a federation's folder: it holds no federation.toml"),
        (("join", "nothing", "--data", "x.npz"), "nothing is not a silo's folder: it holds no silo.toml"),
    ],
)
def test_a_mistake_is_one_sentence(refused: Callable[..., str], arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("federation", *arguments)


def test_records_that_are_not_there_are_missed_before_anything_starts(
    fedloom: Command, refused: Callable[..., str], server: Path, tmp_path: Path
) -> None:
    fedloom("federation", "enroll", server / "invitations" / "west.toml", "--out", tmp_path / "west")
    assert "--data none.npz does not exist" in refused("federation", "join", tmp_path / "west", "--data", "none.npz")


def test_a_stop_signal_while_processes_are_started_is_as_ctrl_c(
    fedloom: Command, server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedloom("federation", "enroll", server / "invitations" / "west.toml", "--out", tmp_path / "west")
    monkeypatch.setattr(Joining, "__enter__", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert fedloom("federation", "join", tmp_path / "west", "--data", tmp_path).exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_across_machines_needs_a_federation_that_is_served(
    refused: Callable[..., str], server: Path, tiny_toml: Path
) -> None:
    assert "--engine flower needs --federation DIR" in refused("run", tiny_toml, "--engine", "flower")
    assert "but --engine fused is asked for" in refused("run", tiny_toml, "--engine", "fused", "--federation", server)
    assert "is not a federation's folder" in refused("run", tiny_toml, "--federation", "nothing")
    assert "no server answers for" in refused("run", tiny_toml, "--federation", server)
    centralised = ("data.layout=centralised", "--federation", server)
    assert "a federation has no centralised layout" in refused("run", tiny_toml, *centralised)
    distributed = ("privacy.mechanism=dp-sgd", "privacy.epsilon=1.0", "privacy.trust=distributed")
    undeclared = refused("run", tiny_toml, *distributed, "--federation", server)
    assert "takes the records of every silo in the charter" in undeclared
    assert not list(server.glob("submissions/*"))


def test_a_run_of_a_federation_is_resumed_with_it(
    refused: Callable[..., str], finished: Path, server: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "status.json").unlink()
    assert "was not made by a federation" in refused("resume", run, "--federation", server)
    RunFolder.open(run).note({"engine_choice": {"name": "flower", "run": "abc"}})
    assert "was made by a federation; say --federation DIR, or call 'flwr run' again" in refused("resume", run)


def test_an_experiment_is_written_as_an_app_of_a_flower_federation(
    fedloom: Command, refused: Callable[..., str], tiny_toml: Path, tmp_path: Path
) -> None:
    made = fedloom("federation", "app", tiny_toml, *INIT[:2], *INIT[4:], "--out", tmp_path / "ours")
    assert made.exit_code == 0
    assert f"flwr run {tmp_path / 'ours'}" in made.stdout
    told = tomllib.loads((tmp_path / "ours" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    charter = Charter.of(tomllib.loads(told["charter"]))
    assert (charter.name, charter.wire, charter.address, charter.groups) == ("ours", "flower", "", ("ct", "mri"))
    assert parse(Config, tomllib.loads(told["experiment"])) == load_config(tiny_toml)
    again = ("federation", "app", tiny_toml, *INIT[:2], *INIT[4:], "--out", tmp_path / "ours")
    assert "exists already; choose another --out" in refused(*again)
    assert "--shape is missing" in refused("federation", "app", tiny_toml, *INIT[:2], "--out", tmp_path / "other")


def test_a_federation_of_the_wire_flower_is_one_sentence(refused: Callable[..., str], server: Path) -> None:
    charter = server / "federation.toml"
    charter.write_text(charter.read_text().replace('wire = "direct"', 'wire = "flower"'))
    for command in ("serve", "status", "renew", "doctor"):
        assert "names the wire 'flower', whose servers fedloom does not run any more" in refused(
            "federation", command, server
        )
