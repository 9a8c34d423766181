"""Privacy that is asked for and not given is refused, and every command says which guarantee holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import Result

from fedloom.config import PrivacyConfig, load_config
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import ServerDirectory, ServerSettings
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import NoMechanismError
from fedloom.experiment import Experiment, resume, train
from fedloom.privacy.ledger import format_epsilon
from fedloom.runs.folder import RunFolder
from support import tiny_config

Command = Callable[..., Result]
Refused = Callable[..., str]

NONE = {"guarantee": "no DP guarantee", "epsilon": None, "delta": None}
CHANGED = {
    "epsilon": "3",
    "budgets": "{silo-0=2.0}",
    "delta": "1e-5",
    "noise_multiplier": "1.1",
    "clip": "0.5",
    "clipping": "quantile",
    "unit": "subject",
    "blocks": "['decoder']",
    "accountant": "rdp",
    "trust": "distributed",
    "tolerated": "1",
    "bits": "24",
    "allocation": "late",
    "shares": "{moments=0.5}",
    "pretraining": "2",
    "noise": "test",
}


def test_every_setting_of_privacy_is_asked_about() -> None:
    assert set(CHANGED) == {each.name for each in fields(PrivacyConfig)} - {"mechanism"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_of_privacy_without_a_mechanism_is_refused_before_a_run_begins(name: str, tmp_path: Path) -> None:
    config = tiny_config(f"privacy.{name}={CHANGED[name]}")
    with pytest.raises(NoMechanismError, match=rf"^privacy\.{name} = .*; add privacy\.mechanism=dp-sgd, or leave out"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    load_config("privacy/demo", [f"privacy.{name}={CHANGED[name]}"]).privacy.check_mechanism()


def test_the_command_names_the_line_to_add_and_leaves_nothing(refused: Refused, tmp_path: Path) -> None:
    sentence = refused("run", "demo", "privacy.epsilon=3", "--out", tmp_path / "run")
    assert "privacy.epsilon = 3.0 without privacy.mechanism: the run would have no DP guarantee" in sentence
    assert "add privacy.mechanism=dp-sgd" in sentence
    assert "(more in docs/privacy.md)" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["grid", "variant"])
def test_a_sweep_refuses_it_before_its_first_run(key: str, refused: Refused, tiny_toml: Path, tmp_path: Path) -> None:
    asked = {
        "grid": "[grid]\nseed = [1]\n'privacy.epsilon' = [0.0, 3.0]\n",
        "variant": "[[variant]]\nname = 'a'\n[[variant]]\nname = 'b'\noverrides.privacy.clip = 0.5\n",
    }
    file = tmp_path / "sweep.toml"
    file.write_text(f'base = "{tiny_toml}"\n{asked[key]}')
    assert "add privacy.mechanism=dp-sgd" in refused("sweep", file, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_deployment_refuses_it_before_any_silo_is_asked(tmp_path: Path) -> None:
    charter = Charter(name="clinics", address="localhost:8443", silos={"one": "a"}, shape=(1, 28, 28))
    settings = ServerSettings(listen="localhost:8443")
    home = ServerDirectory.create(tmp_path / "server", charter, settings, RoundRules())
    with pytest.raises(NoMechanismError, match=r"add privacy\.mechanism=dp-sgd"):
        run_at(home, tiny_config("privacy.epsilon=3"), tmp_path / "run", print)


def test_what_an_older_version_began_stays_readable_and_goes_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", tiny_config("privacy.epsilon=3"))
    assert resume(folder.path).folder.status["state"] == "finished"


@pytest.mark.parametrize(
    ("source", "assignments", "epsilon"),
    [
        ("privacy/demo", ["privacy.mechanism=none"], 0.0),
        ("privacy/demo", ["privacy.mechanism='none'"], 0.0),
        ("privacy/demo", ["privacy.clip=2", "rounds=3"], 3.0),
        ("dp-cvae/table1/cifar10-iid/cvae", [], 0.0),
    ],
)
def test_without_a_mechanism_no_setting_comes_from_beneath(source: str, assignments: list[str], epsilon: float) -> None:
    privacy = load_config(source, assignments).privacy
    assert privacy.epsilon == epsilon
    assert (privacy == PrivacyConfig()) == (privacy.mechanism == "none")
    privacy.check_mechanism()


def test_what_is_said_beside_none_is_still_refused() -> None:
    privacy = load_config("privacy/demo", ["privacy.mechanism=none", "privacy.epsilon=3"]).privacy
    with pytest.raises(NoMechanismError, match=r"^privacy\.epsilon = 3\.0 without privacy\.mechanism"):
        privacy.check_mechanism()


@pytest.fixture(scope="module")
def private(fedloom: Command, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("private") / "run"
    dp = ("rounds=1", "privacy.mechanism=dp-sgd", "privacy.epsilon=8", "privacy.accountant=rdp")
    assert fedloom("run", tiny_toml, *dp, "--out", out).exit_code == 0
    return out


def said(fedloom: Command, command: str, run: Path, folder: Path) -> tuple[list[str], dict[str, object]]:
    """The lines about privacy that a command prints about a copy of a run, and what its JSON says."""
    answers = []
    for number, form in enumerate(((), ("--json",))):
        copied = Path(shutil.copytree(run, folder / str(number)))
        arguments: dict[str, tuple[str | Path, ...]] = {
            "run": (copied / "run.toml", "--out", folder / f"new-{number}"),
            "resume": (copied,),
            "sample": (copied, "--group", "mnist", "--n", "1", "--out", folder / "grid.png"),
            "evaluate": (copied, "--metrics", "spread", "--samples", "10"),
            "audit": (copied, "--attack", "membership", "--records", "20", "--samples", "20"),
        }
        result = fedloom(command, *arguments[command], *form)
        assert result.exit_code == 0, result.output
        answers.append(result.stdout)
    lines = [line for line in answers[0].splitlines() if line.startswith("privacy:")]
    return lines, json.loads(answers[1])["privacy"]


COMMANDS = ["run", "resume", "sample", "evaluate", "audit"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_that_there_is_no_guarantee(
    command: str, fedloom: Command, finished: Path, tmp_path: Path
) -> None:
    assert said(fedloom, command, finished, tmp_path) == (["privacy: no DP guarantee"], NONE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_guarantee_holds(command: str, fedloom: Command, private: Path, tmp_path: Path) -> None:
    (line,), privacy = said(fedloom, command, private, tmp_path)
    assert line == f"privacy: {privacy['guarantee']}"
    epsilon = privacy["epsilon"]
    assert isinstance(epsilon, float)
    assert 7 < epsilon <= 8
    assert line.startswith(f"privacy: ({format_epsilon(epsilon)}, 0.001)-differential privacy for each record")
    assert privacy["delta"] == 0.001  # the largest power of ten that is at most 1 / (10 * 40)


def test_a_ledger_that_is_gone_proves_nothing(fedloom: Command, private: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(private, tmp_path / "run"))
    (run / "ledger.sqlite").unlink()
    result = fedloom("sample", run, "--group", "mnist", "--n", "1", "--out", tmp_path / "grid.png", "--json")
    guarantee = "no DP guarantee can be shown: the run has no ledger (it was removed)"
    assert json.loads(result.stdout)["privacy"] == {"guarantee": guarantee, "epsilon": None, "delta": None}


def test_noise_of_the_seed_proves_nothing(fedloom: Command, private: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(private, tmp_path / "run"))
    noted = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({key: noted[key] for key in noted if key != "noise"}))
    assert "privacy: no DP guarantee can be shown: an older version" in fedloom("resume", run).stdout


def test_a_sweep_says_it_of_each_run_where_they_differ(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'base = "{tiny_toml}"\n[grid]\nrounds = [1]\n[[variant]]\nname = "open"\n[[variant]]\nname = "guarded"\n'
        'overrides.privacy = { mechanism = "dp-sgd", epsilon = 8.0, accountant = "rdp" }\n'
    )
    text = fedloom("sweep", file, "--out", tmp_path / "out").stdout
    assert "open: privacy: no DP guarantee\nguarded: privacy: (" in text
    trials = json.loads(fedloom("sweep", file, "--out", tmp_path / "out", "--json").stdout)["trials"]
    assert trials["open"]["privacy"] == NONE
    assert trials["guarded"]["privacy"]["epsilon"] <= 8


DIVERGING = ("rounds=5", "local.optimizer=sgd", "local.learning_rate=1e30")


def test_a_run_that_diverges_fails_the_command_and_so_does_resuming_it(
    fedloom: Command, tiny_toml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for arguments in (("run", tiny_toml, *DIVERGING, "--out", run), ("resume", run), ("resume", run, "--json")):
        result = fedloom(*arguments)
        assert result.exit_code == 1
        assert "diverged" in result.stdout
        assert "Error" not in result.stderr


def test_a_resumed_run_that_diverges_fails_the_command(fedloom: Command, tmp_path: Path) -> None:
    Experiment.of(tiny_config(*DIVERGING)).begin(tmp_path / "run")
    assert fedloom("resume", tmp_path / "run").exit_code == 1


def test_a_trial_that_diverges_is_a_result_of_its_sweep(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'base = "{tiny_toml}"\n[grid]\nlocal.optimizer = ["sgd"]\nlocal.learning_rate = [1e30, 1e-3]\n')
    result = fedloom("sweep", file, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"2 runs in {tmp_path / 'out'}: 1 diverged, 1 finished")
    assert any(line.startswith("Diverged: learning_rate-1e_30: ") for line in result.stderr.splitlines())
