"""A federation is handed on without a flag where each silo that took part has signed, and only there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deployed_run import deployed_run
from fedloom.errors import ConfigError
from fedloom.privacy.statements import Bundle
from fedloom.release.provenance import check_risk, provenance_of
from fedloom.release.standing import Worth
from fedloom.runs.folder import RunFolder
from statement_samples import experiment, sample_bundle


def test_a_federation_that_has_signed_is_handed_on_without_a_flag(tmp_path: Path) -> None:
    bundle = sample_bundle()
    folder = deployed_run(tmp_path / "run", bundle)
    found = provenance_of(folder)
    assert (found.worth, found.objections, found.silos) == (Worth.SIGNED, (), 2)
    stated = max(statement.body.epsilon for statement in bundle.statements)
    assert (found.epsilon, found.delta) == (pytest.approx(stated), 0.001)
    assert found.guarantee.endswith("; every silo that took part has signed for it")
    assert found.privacy["promise"].startswith("signed by every silo that took part")
    assert found.privacy["unit"] == "record"
    assert "noise" not in found.privacy  # of one machine there is nothing to say
    assert found.source == "the silos of federation fed"
    check_risk(found, folder, accepted=False)


def without_west(bundle: Bundle) -> Bundle:
    return replace(bundle, statements=bundle.statements[:1], keys={"east": bundle.keys["east"]})


def exchanged(bundle: Bundle) -> Bundle:
    return replace(bundle, keys={"east": bundle.keys["west"], "west": bundle.keys["east"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_west, "silo 'west' was drawn for rounds 1, 2 and there is no statement of it"),
        (exchanged, "silo 'east': it states the key"),
        (
            lambda _: sample_bundle({"west": lambda words: words.update(epsilon=0.1)}),
            "silo 'west': it states epsilon 0.1",
        ),
    ],
    ids=["missing", "keys", "epsilon"],
)
def test_the_silo_that_has_not_signed_is_named(change: Callable[[Bundle], Bundle], words: str, tmp_path: Path) -> None:
    folder = deployed_run(tmp_path / "run", change(sample_bundle()))
    found = provenance_of(folder)
    assert (found.worth, found.epsilon) == (Worth.NONE, None)
    assert words in found.guarantee
    with pytest.raises(ConfigError, match=r"no DP guarantee can be shown: .*silo '(east|west)'"):
        check_risk(found, folder, accepted=False)


def test_without_statements_nothing_is_shown(tmp_path: Path) -> None:
    found = provenance_of(deployed_run(tmp_path / "run", sample_bundle(), stated=False))
    (objection,) = found.objections
    assert objection == (
        "no DP guarantee can be shown: the run has no ledger (the ledgers of a deployment lie at its silos, and none "
        "has sent a signed statement)"
    )


def other_update(folder: RunFolder) -> None:
    rows = folder.egress()
    rows[0]["sha256"] = "0" * 64
    (folder.path / "egress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def other_settings(folder: RunFolder) -> None:
    text = folder.config.to_toml().replace("epsilon = 8.0", "epsilon = 9.0")
    (folder.path / "run.toml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_update, "nobody has signed for what silo 'east' sent in round 1"),
        (other_settings, "the statements are about another experiment"),
    ],
)
def test_statements_of_another_run_are_none_of_this_one(
    change: Callable[[RunFolder], None], words: str, tmp_path: Path
) -> None:
    folder = deployed_run(tmp_path / "run", sample_bundle())
    change(folder)
    (objection,) = provenance_of(RunFolder.open(folder.path)).objections
    assert objection == f"no DP guarantee can be shown: {words}"


def test_silos_sign_for_noise_of_their_own_alone(tmp_path: Path) -> None:
    shared = sample_bundle(text=experiment("privacy.trust=distributed"))
    (objection,) = provenance_of(deployed_run(tmp_path / "run", shared)).objections
    assert "privacy.trust = 'distributed', and silos sign for noise of their own alone" in objection
