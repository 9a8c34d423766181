"""``fedloom certificate`` and ``fedloom certificate verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from deployed_run import deployed_run
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import ServerDirectory, ServerSettings
from fedloom.engines.remote.rules import RoundRules
from fedloom.runs.folder import RunFolder
from statement_samples import CHARTER, line_of, pins, sample_bundle
from support import names_in

Command = Callable[..., Result]
Refused = Callable[..., str]
FILES = ["certificate.html", "certificate.json", "certificate.pdf"]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return deployed_run(tmp_path_factory.mktemp("deployed") / "run", sample_bundle())


def test_a_certificate_is_made_where_the_run_is_or_where_asked(
    fedloom: Command, finished: Path, tmp_path: Path
) -> None:
    result = fedloom("certificate", finished)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"{finished / 'certificate'}: certificate.html, certificate.pdf, certificate.json\n"
        "There is no privacy guarantee: nothing limits what the results tell about a single record.\n"
    )
    assert names_in(finished / "certificate") == FILES
    approval = ("--approval", "Ann, officer, 2026-05-31")
    found = json.loads(fedloom("certificate", "--out", tmp_path / "c", finished, *approval, "--json").stdout)
    assert found["out"] == str(tmp_path / "c")
    assert found["matter"]["approvals"] == [{"name": "Ann", "role": "officer", "date": "2026-05-31"}]
    assert json.loads((tmp_path / "c" / "certificate.json").read_text(encoding="utf-8")).items() <= found.items()
    # Whoever guesses records must not learn from a digest that he is right.
    assert RunFolder.open(finished).data_source.digest not in (tmp_path / "c" / "certificate.json").read_text()
    fedloom("certificate", "make", finished, "--out", tmp_path / "again")
    fedloom("certificate", "make", finished, "--out", tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (finished / "certificate" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("certificate", "nowhere"), "nowhere is not a run folder"),
        (("certificate", "RUN", "--approval", "Ann"), "--approval = 'Ann' must be"),
        (("certificate", "verify", "nowhere.json"), "cannot read nowhere.json"),
        (("certificate", "verify", "notes.json"), "notes.json is no file of statements and no certificate"),
        (("certificate", "verify", "notes.json", "--key", "east"), "--key = 'east' must be SILO=FINGERPRINT"),
        (("certificate", "verify", "notes.json", "--federation", "nowhere"), "nowhere is not a federation's folder"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(
    refused: Refused, finished: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "notes.json").write_text("{}")
    assert words in refused(*(str(finished) if word == "RUN" else word for word in arguments))


def test_what_is_signed_is_shown_and_whose_keys_are_unknown(fedloom: Command, signed: RunFolder) -> None:
    result = fedloom("certificate", "verify", signed.statements)
    assert result.exit_code == 0
    for silo, fingerprint in pins().items():
        assert any(
            [*line.split()] == [silo, *fingerprint.split(), "record", "0.442", "0.001"]
            for line in result.stdout.splitlines()
        )
    assert result.stderr == "Note: whose keys these are is not shown here: ask east, west, and give --key\n"
    keys = [word for silo, fingerprint in pins().items() for word in ("--key", f"{silo}={fingerprint}")]
    assert fedloom("certificate", "verify", signed.statements, *keys).stderr == ""
    found = json.loads(fedloom("certificate", "verify", signed.statements, *keys, "--json").stdout)
    assert (found["verified"], found["findings"]) == (True, [])
    assert [silo["key_known"] for silo in found["silos"]] == [True, True]


def test_the_federations_folder_knows_charter_and_keys(fedloom: Command, signed: RunFolder, tmp_path: Path) -> None:
    home = ServerDirectory.create(tmp_path / "fed", Charter.of(CHARTER), ServerSettings(), RoundRules())
    for silo in pins():
        (home.admitted / f"{silo}.pub").write_text(f"{line_of(silo)}\n")
    result = fedloom("certificate", "verify", signed.statements, "--federation", home.path)
    assert (result.exit_code, result.stderr) == (0, "")
    (home.admitted / "east.pub").write_text(f"{line_of('west')}\n")
    result = fedloom("certificate", "verify", signed.statements, "--federation", home.path)
    assert result.exit_code == 1
    assert result.stderr.startswith("Wrong: silo 'east': its key has the fingerprint")


def test_a_changed_file_exits_with_1_in_a_process_of_its_own(signed: RunFolder, tmp_path: Path) -> None:
    def verified(data: bytes) -> subprocess.CompletedProcess[str]:
        (tmp_path / "statements.json").write_bytes(data)
        command = [sys.executable, "-m", "fedloom", "certificate", "verify", "statements.json"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    data = signed.statements.read_bytes()
    assert verified(data).returncode == 0
    result = verified(data.replace(b'"units":100', b'"units":101', 1))
    assert result.returncode == 1
    assert "Wrong: silo 'east': its signature does not belong to its words and its key" in result.stderr
