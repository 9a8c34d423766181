"""A certificate, and what its silos signed, on another machine: whatever was changed is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployed_run import deployed_run
from fedloom.certificate.checking import Checked, Known, check_file
from fedloom.certificate.making import make_certificate
from fedloom.errors import FedloomError
from fedloom.runs.folder import RunFolder
from statement_samples import CHARTER, line_of, pins, sample_bundle, statement_of, unsigned_bundle

Tree = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return deployed_run(tmp_path / "run", sample_bundle())


@pytest.fixture
def certificate(folder: RunFolder, tmp_path: Path) -> Path:
    make_certificate(folder, tmp_path / "out")
    return tmp_path / "out" / "certificate.json"


def changed(file: Path, change: Callable[[Tree], object]) -> Checked:
    tree = json.loads(file.read_text(encoding="utf-8"))
    change(tree)
    file.write_text(json.dumps(tree), encoding="utf-8")
    return check_file(file, Known(pins(), CHARTER))


def test_what_nobody_changed_holds(folder: RunFolder, certificate: Path) -> None:
    for file in (folder.statements, certificate):
        found = check_file(file, Known(pins(), CHARTER))
        assert found.findings == ()
        assert [figure.silo for figure in found.signed] == ["east", "west"]
        assert check_file(file, Known({})).unknown == ("east", "west")
        assert found.unknown == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(verdict="All is well."), "its sentences are not those that follow"),
        (lambda t: t["sections"][2]["sentences"].append("And more."), "its sentences are not those that follow"),
        (lambda t: t["matter"].update(objections=["x"]), "its sentences are not those that follow"),
        (lambda t: t["matter"].update(epsilon=0.1), "its epsilon and delta are not the largest"),
        (lambda t: t["matter"].update(delta=1e-9), "its epsilon and delta are not the largest"),
        (lambda t: t["matter"].update(unit="subject"), "it promises something for each subject"),
        (lambda t: t["matter"]["signed"][0].update(epsilon=0.1), "the figures in its table are not those"),
        (lambda t: t["matter"].update(signed=[]), "the figures in its table are not those"),
        (lambda t: t["matter"]["silos"].append("north"), "silo 'north' took part, and has signed nothing"),
        (lambda t: t.update(fedloom="9.9"), "it was made with fedloom 9.9"),
        (lambda t: t.update(statements=""), "nobody has signed it"),
    ],
)
def test_a_certificate_that_was_changed_is_found_out(
    change: Callable[[Tree], object], words: str, certificate: Path
) -> None:
    assert any(words in sentence for sentence in changed(certificate, change).findings)


def test_statements_inside_a_certificate_are_checked_as_those_beside_it(certificate: Path) -> None:
    forged = sample_bundle({"east": lambda words: words.update(epsilon=0.01)}).to_bytes().decode()
    found = changed(certificate, lambda tree: tree.update(statements=forged)).findings
    assert any("silo 'east': it states epsilon 0.01" in sentence for sentence in found)


def test_what_a_reader_knows_is_compared(folder: RunFolder) -> None:
    def found(keys: dict[str, str], charter: dict[str, Any] | None = None) -> tuple[str, ...]:
        return check_file(folder.statements, Known(keys, charter)).findings

    (wrong,) = found({**pins(), "east": pins()["west"]})
    assert wrong.startswith("silo 'east': its key has the fingerprint")
    assert found({"north": "aaaa"}) == ("silo 'north': its key is known, and it has signed nothing",)
    assert found({}, {**CHARTER, "name": "other"}) == (
        "it was signed under another charter than that of the federation's folder",
    )


def test_whoever_has_no_guarantee_is_told_of(tmp_path: Path) -> None:
    """In JSON as well, which knows no infinite number."""
    asked = unsigned_bundle()

    def none(words: Tree) -> None:
        words["charges"][0]["event"] = {"kind": "no-guarantee", "reason": "its noise was seeded"}
        words["epsilon"] = None

    bundle = asked
    for silo in ("east", "west"):
        bundle = bundle.having(statement_of(asked, silo, none), line_of(silo))
    folder = deployed_run(tmp_path / "run", bundle)
    found = check_file(folder.statements, Known({}))
    assert any("no DP guarantee: its noise was seeded" in sentence for sentence in found.findings)
    assert [silo["epsilon"] for silo in json.loads(json.dumps(found.to_mapping()))["silos"]] == [None, None]
    make_certificate(folder, tmp_path / "out")  # it says so itself, and has no table of figures
    assert check_file(tmp_path / "out" / "certificate.json", Known({})).findings == found.findings


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "privacy certificate"}', "\x00"])
def test_what_is_no_such_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(FedloomError, match="is no file of statements and no certificate"):
        check_file(tmp_path / "file", Known({}))


def test_a_certificate_without_some_silo_says_which(tmp_path: Path) -> None:
    whole = sample_bundle()
    half = replace(whole, statements=whole.statements[:1], keys={"east": whole.keys["east"]})
    made = make_certificate(deployed_run(tmp_path / "run", half), tmp_path / "out")
    assert made.verdict.startswith("There is no privacy guarantee")
    assert any("silo 'west' was drawn for rounds 1, 2 and there is no statement of it" in text for text in made.texts)
    assert len(check_file(tmp_path / "out" / "certificate.json", Known({})).findings) > 1
