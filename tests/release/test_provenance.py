"""What is said of a run that is handed on, and what stands against it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.config import AuditConfig, Config
from fedloom.errors import ConfigError, RunFolderError
from fedloom.experiment import Run, load, train
from fedloom.privacy.ledger import format_epsilon, read_accounts
from fedloom.release.cards import dataset_card
from fedloom.release.export import export
from fedloom.release.provenance import Limits, Provenance, check_risk, provenance_of
from fedloom.release.standing import Worth
from fedloom.release.synthesis import SynthesisOrder, synthesize
from fedloom.runs.files import write_json
from fedloom.runs.ledgers import LEDGER
from labelled_vectors import labelled_federation
from support import names_in

Changed = Callable[[Run], Run]


@pytest.fixture
def copied(tmp_path: Path) -> Changed:
    return lambda run: load(shutil.copytree(run.folder.path, tmp_path / "copy"))


def reconfigured(run: Run, config: Config) -> Run:
    (run.folder.path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    return load(run.folder.path)


def spent(run: Run) -> float:
    return max(account.spent for account in read_accounts(run.folder.ledger))


def card_of(provenance: Provenance, **changes: Any) -> tuple[dict[str, Any], str]:
    """A card's header, and its text."""
    contents = {
        "format": "folder",
        "records": 5000,
        "shape": [1, 28, 28],
        "labels": None,
        "pathway": {"name": "z1", "summary": "z1 -> x"},
        "seed": 3,
        "counts": {"mnist": {"": 5000}},
        "licence": "cc-by-4.0",
    }
    _, header, text = dataset_card(provenance, contents | changes).split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_private_run_may_be_handed_on_and_its_card_states_what_was_spent(private: Run) -> None:
    found = provenance_of(private.folder)
    assert found.objections == ()
    assert (found.silos, found.rounds, found.epsilon) == (2, 3, spent(private))
    check_risk(found, private.folder, accepted=False)
    header, text = card_of(found)
    assert "differential-privacy" in header["tags"]
    assert (
        f"- guarantee: ({format_epsilon(spent(private))}, {found.delta:g})-differential privacy for each record" in text
    )
    assert f"- epsilon spent: {format_epsilon(spent(private))}\n- delta: {found.delta:g}\n" in text
    replaced = max(account.replaced for account in read_accounts(private.folder.ledger))
    assert f"- replacement: for one record replaced by another: at most epsilon {format_epsilon(replaced)}\n" in text
    assert replaced > spent(private)
    assert "- trust: local: each silo adds all its own noise" in text
    assert "- noise: drawn from a secret of the operating system, which was thrown away when the run had ended" in text
    assert "the records of 2 silos" in text
    assert "--accept-risk" not in text


def test_a_simulation_on_public_data_says_that_it_is_one(private: Run) -> None:
    found = provenance_of(private.folder)
    told = "a simulation on public data: one machine computed all silos' noise from a fast generator and nobody signed"
    assert (found.worth, found.to_mapping()["worth"]) == (Worth.SIMULATION, "simulation")
    assert f"- promise: {told}" in card_of(found)[1]


def test_a_simulation_on_anybodys_data_is_a_study_and_no_promise(private: Run, copied: Changed, tmp_path: Path) -> None:
    run = copied(private)
    known = {**run.folder.environment["data"], "public": False}
    run.folder.note({"data": known})
    run = reconfigured(run, replace(run.config, data=replace(run.config.data, public=False)))
    found = provenance_of(run.folder)
    (objection,) = found.objections
    assert objection == (
        "a simulation on data that are not public: one machine computed all silos' noise from a fast generator and "
        "nobody signed for it; it is a study, not a promise to the people in the data"
    )
    assert (found.worth, found.epsilon) == (Worth.STUDY, spent(private))
    for attempt in (
        lambda **risk: synthesize(run, tmp_path / "out", SynthesisOrder(records=2, form="npz"), **risk),
        lambda **risk: export(run, tmp_path / "generators", "safetensors", **risk),
    ):
        with pytest.raises(ConfigError, match=r"a study, not a promise .*; --accept-risk does it all the same"):
            attempt()
        attempt(accept_risk=True)
    for place in ("out", "generators"):
        card = (tmp_path / place / "README.md").read_text(encoding="utf-8")
        assert f"although something stands against it:**\n\n- {objection}\n" in card


def test_a_card_names_the_data_of_the_run_and_no_other_source(private: Run) -> None:
    found = provenance_of(private.folder)
    assert found.source == private.folder.data_source.name != private.config.data.source
    assert found.source.startswith("in memory")
    text = card_of(found)[1]
    assert f"- records of: {found.source}\n" in text
    assert private.config.data.source not in text
    assert private.folder.data_source.digest not in text


def test_noise_that_a_seed_gives_is_no_guarantee(private: Run, tmp_path: Path) -> None:
    """Neither where it was asked for, nor where an older version knew no other."""
    old = load(shutil.copytree(private.folder.path, tmp_path / "old"))
    facts = {key: value for key, value in old.folder.environment.items() if key != "noise"}
    (old.folder.path / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    seeded = replace(private.config, privacy=replace(private.config.privacy, noise="test"))
    asked_for = train(seeded, tmp_path / "seeded", labelled_federation())
    for run, why in ((old, "an older version drew the run's noise from its seed"), (asked_for, "experiment's seed")):
        found = provenance_of(run.folder)
        assert (found.epsilon, "noise" in found.privacy) == (None, False)
        assert found.guarantee.startswith("no DP guarantee")
        assert why in found.guarantee
        with pytest.raises(ConfigError, match="--accept-risk"):
            check_risk(found, run.folder, accepted=False)


def test_a_run_without_a_guarantee_needs_the_flag_and_its_card_says_so(images: Run, tmp_path: Path) -> None:
    found = provenance_of(images.folder)
    assert found.objections == ("no DP guarantee",)
    with pytest.raises(ConfigError, match=r"is not handed on \(no DP guarantee\); --accept-risk does it all the same"):
        synthesize(images, tmp_path / "out", SynthesisOrder(records=2, form="npz"))
    assert names_in(tmp_path) == []
    header, text = card_of(found)
    assert "differential-privacy" not in header["tags"]
    assert "**Handed on with `--accept-risk`, although something stands against it:**\n\n- no DP guarantee\n" in text
    assert "- guarantee: no DP guarantee\n" in text
    assert "## Audit\n\nNot audited." in text


@pytest.mark.parametrize(("engine", "where"), [("reference", "it was removed"), ("flower", "lie at its silos")])
def test_a_private_run_without_its_ledger_can_show_nothing(
    engine: str, where: str, private: Run, copied: Changed
) -> None:
    run = copied(private)
    run.folder.ledger.unlink()
    run.folder.note({"engine_choice": {"name": engine}})
    found = provenance_of(run.folder)
    assert (found.epsilon, found.delta) == (None, None)
    (objection,) = found.objections
    assert objection.startswith("no DP guarantee can be shown: the run has no ledger")
    assert where in objection
    assert f"- guarantee: {objection}" in card_of(found)[1]


@pytest.mark.parametrize(
    ("kept", "remembered", "reason"),
    [
        (5, True, "ledger.sqlite, with 5 charges, is older than the one that the newest checkpoint was made with, wh"),
        (5, False, "ledger.sqlite has no charge for round 2 of silo 'two', in which something left it (egress.jsonl)"),
        (0, False, "ledger.sqlite has no charge for round 1 of silo 'one', in which something left it (egress.jsonl)"),
    ],
)
def test_a_ledger_that_lacks_what_left_shows_nothing(
    kept: int, remembered: bool, reason: str, private: Run, copied: Changed
) -> None:
    """Whatever an older copy of it adds up to; also where an older version remembered no ledger."""
    run = copied(private)
    with contextlib.closing(sqlite3.connect(run.folder.ledger, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER charges_DELETE")
        connection.execute("DELETE FROM charges WHERE number > ?", (kept,))
    if not remembered:
        (index,) = run.folder.path.glob("checkpoints/round-0003/index.json")
        write_json(index, {key: value for key, value in json.loads(index.read_text()).items() if key != LEDGER})
    found = provenance_of(run.folder)
    assert found.epsilon is None
    (objection,) = found.objections
    assert objection.startswith(f"no DP guarantee can be shown: {reason}")


def test_canaries_and_a_refuted_epsilon_stand_against_a_run(private: Run, copied: Changed) -> None:
    run = copied(private)
    run.folder.record_audit({"round": 2, "refuted": True, "sentences": ["canaries: epsilon is at least 9"]})
    found = provenance_of(reconfigured(run, replace(run.config, audit=AuditConfig(canaries=30))).folder)
    canaries, refuted = found.objections
    assert canaries.startswith("not for release: 30 canaries")
    assert refuted == "an audit refuted the epsilon that is claimed"
    assert "- round 2 was audited, and round 3 is released\n- canaries: epsilon is at least 9\n" in card_of(found)[1]


@pytest.mark.parametrize(
    ("limits", "objections"),
    [
        (Limits(8.0, 0.5), 0),
        (Limits(0.5, 0.5), 1),
        (Limits(8.0, 1e-9), 1),
    ],
)
def test_a_silos_policy_is_kept_to(limits: Limits, objections: int, private: Run) -> None:
    found = provenance_of(private.folder, [Limits(100.0, 0.5), limits]).objections
    assert len(found) == objections
    for objection in found:
        assert objection.startswith(f"a silo's policy allows epsilon {limits.epsilon:g} at delta {limits.delta:g}")
        assert f"epsilon {format_epsilon(spent(private))}" in objection


def test_where_no_epsilon_is_known_no_policy_is_kept_to(images: Run) -> None:
    assert len(provenance_of(images.folder, [Limits(100.0, 0.5)]).objections) == 2


@pytest.mark.parametrize(
    ("state", "words"), [("", "is unfinished, .* 'fedloom resume"), ("diverged", "is diverged, and only a finished")]
)
def test_only_a_finished_run_is_handed_on(state: str, words: str, images: Run, copied: Changed) -> None:
    run = copied(images)
    (run.folder.path / "status.json").unlink()
    if state:
        run.folder.end(state, 2, "loss exploded")
    with pytest.raises(RunFolderError, match=words):
        provenance_of(run.folder)


def test_quality_is_that_of_the_released_round_and_of_no_single_silo(images: Run, copied: Changed) -> None:
    run = copied(images)
    run.folder.record_evaluation(2, {"frechet/x/n5/group=mnist": 12.25, "elbo/n5/silo=mnist-0": -1.0}, 0.1)
    run.folder.record_evaluation(1, {"kernel/x/n5/group=mnist": 3.0}, 0.1)
    found = provenance_of(run.folder)
    assert {key.partition("/")[0] for key in found.metrics} == {"spread", "frechet"}
    text = card_of(found)[1]
    assert "| metric | mnist | fashion-mnist | key |" in text
    assert "| Frechet distance (x) | 12.25 |  | frechet/x/n5 |" in text
    assert "no privacy guarantee covers these numbers" in text


def test_a_name_cannot_break_the_card(images: Run) -> None:
    name = 'a: "b"\n---\n# <script>|'
    header, text = card_of(replace(provenance_of(images.folder), name=name), counts={"x|y\n| z": {"": 1}}, format="npz")
    assert header["pretty_name"] == f"{name} (synthetic)"
    assert (header["license"], header["size_categories"]) == ("cc-by-4.0", ["1K<n<10K"])
    assert "configs" not in header  # Hugging Face reads no npz
    assert text.lstrip().splitlines()[0] == '# a: "b" --- # &lt;script>\\|: synthetic data'
    assert "| x\\|y \\| z | 1 |" in text


def test_nothing_of_a_run_names_its_silos_or_seed(private: Run, tmp_path: Path) -> None:
    synthesize(private, tmp_path / "out", SynthesisOrder(records=3, form="npz", seed=8))
    manifest = (tmp_path / "out" / "manifest.json").read_text(encoding="utf-8")
    assert json.loads(manifest)["run"]["config"] == private.config.digest_without_seed()
    for text in (manifest, (tmp_path / "out" / "README.md").read_text(encoding="utf-8")):
        assert private.config.digest() not in text
        assert '"one"' not in text
