"""What a private run says of itself: ``fedloom ledger``, ``inspect`` and the report."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.cli import ledger as cli_ledger
from fedloom.privacy.deployment import data_ledger
from fedloom.privacy.ledger import Ledger, format_epsilon, read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from html_pages import Page
from privacy.sqlite_faults import EVENT, SILO

Command = Callable[..., Result]
Refused = Callable[..., str]

DP = ("rounds=2", "privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp")


@pytest.fixture(scope="module")
def private(fedloom: Command, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("private") / "run"
    result = fedloom("run", tiny_toml, *DP, "privacy.budgets.mnist-0=2", "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("epsilon") == 0  # no line of progress for it in every round
    return out


def test_ledger_shows_spent_and_left(fedloom: Command, private: Path) -> None:
    accounts = read_accounts(private / "ledger.sqlite")
    *lines, explained = fedloom("ledger", private).stdout.splitlines()
    rows = [line.split() for line in lines]
    assert rows[0] == ["silo", "release", "charges", "spent", "left", "epsilon", "delta", "accountant"]
    assert explained == "replaced: for one record (or subject) replaced by another, at most this epsilon"
    for row, replaced, account in zip(rows[1::2], rows[2::2], accounts, strict=True):
        granted = 2 if account.silo == "mnist-0" else 5
        assert row[:3] + row[5:] == [account.silo, "all", "2", f"{granted}", "0.001", "rdp"]
        spent, left = float(row[3]), float(row[4])
        assert account.spent <= spent < account.spent + 0.0011
        assert replaced == ["replaced", format_epsilon(account.replaced)]
        assert account.left - 0.0011 < left <= account.left
    assert len(rows) == 1 + 2 * 4


def test_ledger_as_json_is_the_accounts(fedloom: Command, private: Path) -> None:
    file = private / "ledger.sqlite"
    found = json.loads(fedloom("ledger", file, "--json").stdout)
    assert found == {"ledger": str(file), "silos": [account.to_mapping() for account in read_accounts(file)]}
    assert json.loads(fedloom("ledger", private, "--json").stdout) == found


def test_inspect_states_the_guarantee(fedloom: Command, private: Path, finished: Path) -> None:
    spent = max(account.spent for account in read_accounts(private / "ledger.sqlite"))
    sentence = f"({format_epsilon(spent)}, 0.001)-differential privacy for each record"
    found = json.loads(fedloom("inspect", private, "--json").stdout)["privacy"]
    assert found["guarantee"].startswith(sentence)
    assert (found["epsilon"], found["delta"], found["unit"]) == (spent, 0.001, "record")
    assert "added or removed" in found["adjacency"]
    replaced = max(account.replaced for account in read_accounts(private / "ledger.sqlite"))
    assert spent < found["epsilon_replaced"] == replaced
    assert found["replacement"] == f"for one record replaced by another: at most epsilon {format_epsilon(replaced)}"
    assert found["trust"].startswith("local: each silo adds all its own noise")
    text = " ".join(fedloom("inspect", private).stdout.split())
    assert f"privacy: {sentence}" in text
    assert f"privacy, replacement: {found['replacement']}" in text
    assert "privacy, not covered: training losses" in text
    plain = json.loads(fedloom("inspect", finished, "--json").stdout)["privacy"]
    assert (plain["guarantee"], plain["epsilon"], plain["silos"]) == ("no DP guarantee", None, [])
    assert "privacy: no DP guarantee" in fedloom("inspect", finished).stdout.splitlines()


def test_a_shortcut_is_called_one(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedloom("run", tiny_toml, *DP, "rounds=1", "privacy.blocks=['decoder']", "--out", out)
    found = json.loads(fedloom("inspect", out, "--json").stdout)["privacy"]
    assert found["guarantee"].startswith("no DP guarantee: only decoder is privatised")
    assert found["epsilon"] is found["epsilon_replaced"] is None
    assert "replacement" not in found
    rows = [line.split() for line in fedloom("ledger", out).stdout.splitlines()]
    assert [row[3] for row in rows[1:-1:2]] == ["inf"] * 4
    assert rows[2:-1:2] == [["replaced", "inf"]] * 4


def test_the_report_has_a_page_of_privacy(fedloom: Command, private: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert fedloom("report", private, "--out", out).exit_code == 0
    page = Page(out.read_text(encoding="utf-8"))
    accounts = read_accounts(private / "ledger.sqlite")
    for words in (
        f"({format_epsilon(max(account.spent for account in accounts))}, 0.001)-differential privacy",
        "one record of a silo added or removed",
        "each silo adds all its own noise",
        *(format_epsilon(account.spent) for account in accounts),
        *(format_epsilon(account.replaced) for account in accounts),
        "for one record replaced by another: at most epsilon "
        + format_epsilon(max(account.replaced for account in accounts)),
    ):
        assert words in page.text, words


def test_a_report_of_a_damaged_ledger_promises_nothing(fedloom: Command, private: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(private, tmp_path / "run"))
    (run / "ledger.sqlite").write_bytes(b"not a ledger at all" * 100)
    assert fedloom("report", run, "--out", tmp_path / "report.html").exit_code == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "no DP guarantee: the ledger cannot be read" in page.text
    assert "differential privacy for each" not in page.text


def test_ledger_refuses_what_is_none(refused: Refused, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "other.sqlite").write_bytes(b"something else" * 100)
    assert f"there is no ledger at {finished}/ledger.sqlite" in refused("ledger", finished)
    assert "there is no ledger at nowhere" in refused("ledger", "nowhere")
    assert "cannot use the ledger" in refused("ledger", tmp_path / "other.sqlite")
    assert "is not a run folder" in refused("ledger", tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.mechanism=dpsgd"], ["privacy.mechanism", "did you mean 'dp-sgd'"]),
        (["privacy.epsilon=0"], ["privacy.mechanism = 'dp-sgd' needs privacy.epsilon"]),
        (["privacy.epsilon=-2"], ["privacy.epsilon = -2", "at least 0"]),
        (["privacy.delta=-1e-5"], ["privacy.delta", "at least 0 and below 1"]),
        (["local.batch_size=64"], ["local.batch_size is 64", "silo 'mnist-0' holds 40"]),
        (["privacy.trust=distributed"], ["privacy.trust = 'distributed'", "set local.steps = 1"]),
        (["privacy.unit=subject"], ["privacy.unit = 'subject'", "do not say whose they are"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_run_refuses(refused: Refused, tiny_toml: Path, tmp_path: Path, settings: list[str], words: list[str]) -> None:
    sentence = refused("run", tiny_toml, *DP, *settings, "--out", tmp_path / "out")
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "out").exists()


def test_a_budget_below_the_cost_of_a_round_is_warned_of(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    result = fedloom(
        "run", tiny_toml, *DP, "privacy.epsilon=0.01", "privacy.noise_multiplier=1", "--out", tmp_path / "run"
    )
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "smaller than the cost of one round" in line]
    assert len(lines) == 4
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    assert all(account.spent == 0 for account in ledger.accounts())
    ledger.close()


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [(1.0, "1"), (9.9554, "9.956"), (0.00001, "0.001"), (1e306, "inf"), (math.inf, "inf")],
)
def test_a_printed_epsilon_is_never_too_small(epsilon: float, words: str) -> None:
    assert format_epsilon(epsilon) == words


@pytest.fixture
def registered(tmp_path: Path) -> Path:
    """A silo's ledger with one charge."""
    path = tmp_path / "silo of north" / "ledger.sqlite"
    path.parent.mkdir()
    ledger = data_ledger(path, SILO, 50.0)
    ledger.charge("run", "north", 1, "update", EVENT, content=None)
    ledger.close()
    return path


def test_the_registry_lists_the_ledgers_of_this_machine(fedloom: Command, registered: Path, registry: Path) -> None:
    found = json.loads(fedloom("ledger", "--registry", "--json").stdout)
    row = {"silo": "north", "charges": 1, "ledger": str(registered)}
    assert found == {"registry": str(registry), "ledgers": [row]}
    rows = [line.split() for line in fedloom("ledger", "--registry").stdout.splitlines()]
    assert rows[0] == ["silo", "charges", "ledger"]
    assert rows[1][:2] == ["north", "1"]


def test_a_registry_that_is_not_there_is_empty_and_stays_away(fedloom: Command, registry: Path) -> None:
    assert json.loads(fedloom("ledger", "--registry", "--json").stdout)["ledgers"] == []
    assert not registry.exists()


def test_a_ledger_is_forgotten_by_who_says_so_twice(
    fedloom: Command, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = fedloom("ledger", "--forget", registered)
    assert alone.exit_code == 2
    assert "asks first, and nobody is there to answer; add --yes" in alone.stderr
    monkeypatch.setattr(cli_ledger, "answers", lambda: True)
    assert CliRunner().invoke(app, ["ledger", "--forget", str(registered)], input="n\n").exit_code == 1
    assert len(json.loads(fedloom("ledger", "--registry", "--json").stdout)["ledgers"]) == 1
    agreed = CliRunner().invoke(app, ["ledger", "--forget", str(registered)], input="y\n")
    assert agreed.exit_code == 0
    assert f"no longer knows that {registered} counted 1 charge: a new, older or second" in agreed.stdout
    assert json.loads(fedloom("ledger", "--registry", "--json").stdout)["ledgers"] == []
    assert registered.is_file()


def test_a_lost_ledger_is_forgotten_with_yes(fedloom: Command, refused: Refused, registered: Path) -> None:
    registered.unlink()
    assert fedloom("ledger", "--forget", registered, "--yes").exit_code == 0
    assert "no ledger at" in fedloom("ledger", "--forget", registered, "--yes").stderr
    unknown = fedloom("ledger", "--forget", registered)
    assert (unknown.exit_code, unknown.stdout) == (2, ""), "nothing is asked about what is not there"
    data_ledger(registered, SILO, 50.0).close()


def test_one_thing_at_a_time_is_asked_of_the_ledger(refused: Refused, private: Path) -> None:
    for arguments in ((), (private, "--registry"), ("--registry", "--forget", private), (private, "--forget", private)):
        assert "give either a run folder or a ledger, or --registry, or --forget" in refused("ledger", *arguments)


def test_no_digest_of_records_is_handed_on(fedloom: Command, private: Path, tmp_path: Path) -> None:
    """A run's own folder has them, but neither what is said of it nor what is made of it for others."""
    fedloom("report", private, "--out", tmp_path / "report.html")
    fedloom("export", private, "--out", tmp_path / "export", "--accept-risk")
    fedloom("synthesize", private, "--n", "4", "--out", tmp_path / "made", "--accept-risk")
    (tmp_path / "inspected").write_text(fedloom("inspect", private, "--json").stdout)
    facts = load_checkpoint(private).facts
    digests = [facts["federation"], *(account.data for account in read_accounts(private / "ledger.sqlite"))]
    assert len({len(digest) for digest in digests}) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"report.html", "inspected", "manifest.json", "README.md"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        assert not [digest for digest in digests if digest.encode() in content], path
