"""fedloom as a job of somebody else's NVFlare federation: what is written for servers and for sites."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.config import load_config
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.nvflare.job import CONDUCTOR, EXECUTOR, SITE_CONFIG, SITE_TEXT, read_told, write_job
from fedloom.deployment.nvflare.kit import GUARD, ROLES, harden
from fedloom.errors import ConfigError, RunFolderError


def written(folder: Path, *options: str) -> Path:
    """A job by the command that people type."""
    command = ("federation", "job", "demo", "--silos", "ct:north,ct:south", "--shape", "1,28,28")
    found = CliRunner().invoke(app, [*command, "--out", str(folder), *options], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return folder


def test_a_job_holds_no_code_and_the_same_for_sites_whatever_the_experiment(tmp_path: Path) -> None:
    job = written(tmp_path / "job")
    assert sorted(str(path.relative_to(job)) for path in job.rglob("*") if path.is_file()) == [
        "meta.json",
        "server/config/config_fed_server.json",
        "server/config/fedloom.toml",
        f"sites/{SITE_CONFIG}",
    ]
    meta = json.loads((job / "meta.json").read_text())
    assert meta["deploy_map"] == {"server": ["server"], "sites": ["north", "south"]}
    assert meta["min_clients"] == 2
    assert json.loads((job / "server/config/config_fed_server.json").read_text())["workflows"][0]["path"] == CONDUCTOR
    told = HostedRun.of(read_told(job / "server"))
    assert told.config == load_config("demo")
    assert (told.charter.wire, dict(told.charter.silos)) == ("nvflare", {"north": "ct", "south": "ct"})
    other = written(tmp_path / "other", "--records", "north=5,south=9")
    assert (other / "sites" / SITE_CONFIG).read_bytes() == (job / "sites" / SITE_CONFIG).read_bytes()
    assert str(tmp_path) not in (job / "sites" / SITE_CONFIG).read_text()
    with pytest.raises(RunFolderError, match="exists already"):
        write_job(told, job)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """As NVFlare's provisioning makes it, as far as this matters."""
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    (tmp_path / "kit" / "local").mkdir()
    settings = {"format_version": 2, "servers": [], "client": {"fqsn": "north"}}
    (tmp_path / "kit" / "startup" / "fed_client.json").write_text(json.dumps(settings))
    (tmp_path / "kit" / "local" / "resources.json.default").write_text("{}")
    (tmp_path / "north.csv").write_text("age\n50\n")
    return tmp_path / "kit"


def test_a_hardened_kit_allows_one_class_no_code_and_no_logs(kit: Path, tmp_path: Path) -> None:
    for _ in range(2):  # it may be hardened again, with another place for its records
        assert harden(kit, tmp_path / "home", tmp_path / "north.csv", "") == "north"
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == [EXECUTOR]
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert resources["components"][0]["path"] == GUARD
    assert not [each for each in resources["components"] if "log" in each["path"]]
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert set(rights) == set(ROLES)
    for role in ROLES:
        assert {rights[role][right] for right in ("byoc", "shell_commands", "operate", "download_job")} == {"none"}
    said = (kit / "local" / "log_config.json").read_text()
    assert '"()"' not in said  # which is called
    assert "ext://" not in said
    seat = tomllib.loads((kit / "local" / "fedloom.toml").read_text())
    assert seat == {"home": str(tmp_path / "home"), "data": str(tmp_path / "north.csv")}


@pytest.mark.parametrize(
    "left",
    ["local/custom", "startup/custom", "local/a__p_resources.json", "startup/b__resources.json", "local/privacy.json"],
)
def test_whatever_else_could_give_a_site_orders_has_to_go_first(kit: Path, tmp_path: Path, left: str) -> None:
    (kit / left).mkdir()
    with pytest.raises(ConfigError, match=f"{Path(left).name} could have this site do"):
        harden(kit, tmp_path, tmp_path)
    assert not (kit / "local" / "resources.json").exists()


@pytest.mark.parametrize("left", ["custom/sitecustomize.py", "config/config_fed_client.conf"])
def test_a_job_that_ran_before_has_to_go_unless_it_was_fedloom_s(kit: Path, tmp_path: Path, left: str) -> None:
    """A server may start it again by its number, without sending its app."""
    own = kit / "0b7d" / "app_north"
    for file in (own / SITE_CONFIG, own / ".__nvfl_sig.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(SITE_TEXT)
    assert harden(kit, tmp_path, tmp_path) == "north"
    (own / left).parent.mkdir(exist_ok=True)
    (own / left).write_text("")
    with pytest.raises(ConfigError, match="0b7d is of a job that a server could start again"):
        harden(kit, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ('{"client": {"fqsn": "north"}, "components": []}', "holds 'components'"),
        ('{"client": {"fqsn": "north"}, "app_validator": {}}', "holds 'app_validator'"),
        ('{"client": {}}', "does not say which site it is"),
        ("nonsense", "cannot be read"),
    ],
)
def test_startup_settings_that_are_not_a_site_s_are_refused(
    kit: Path, tmp_path: Path, settings: str, reason: str
) -> None:
    (kit / "startup" / "fed_client.json").write_text(settings)
    with pytest.raises(ConfigError, match=reason):
        harden(kit, tmp_path, tmp_path)


def test_records_that_are_not_there_are_asked_for(kit: Path, tmp_path: Path) -> None:
    command = ("federation", "harden", str(kit), "--home", str(tmp_path / "home"), "--data", str(tmp_path / "none.csv"))
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 2
    assert "is not there" in " ".join(found.output.split())
    done = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "north.csv")], catch_exceptions=False)
    assert (done.exit_code, "north" in done.output) == (0, True)
