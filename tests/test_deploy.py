"""Files for containers, clusters and service managers: they call what exists, and pin what they promise to."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from documentation import check

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fedloom"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
PARTIES = {name: each for name, each in COMPOSE["services"].items() if name != "setup"}


def test_the_image_is_pinned_by_digest_and_nobody_in_it_is_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"${BASE}"}
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", base)
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    assert text.index("USER ") < text.index("ENTRYPOINT ")
    steps = re.split(r"&&|\n", text.replace("\\\n", " "))
    installs = [step for step in steps if "pip install" in step]
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)
    assert len(installs) == 3


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_every_package_of_the_image_has_its_version_and_hash(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    packages = re.findall(
        r"^(\S+)==(\S+?)(?: ;[^\\\n]*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M
    )
    assert len(packages) == len(re.findall(r"^\S", text, re.M)) > 0
    tested = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    tested = {normal(package): version for package, version in tested.items()}
    for package, version, _ in packages:
        assert tested.get(normal(package), version.partition("+")[0]) == version.partition("+")[0], package


def test_the_image_has_what_the_direct_wire_and_privacy_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["direct"], *extras["privacy"], *extras["operations"]]
    names = {normal(re.split(r"[<>=\[ ]", each)[0]) for each in wanted} - {"fedloom"}
    locked = {normal(each) for each in re.findall(r"^(\S+?)==", (DEPLOY / "requirements.txt").read_text(), re.M)}
    assert names - locked == set()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_call_a_command_that_exists_and_may_do_little(unit: Path) -> None:
    settings = dict(line.partition("=")[::2] for line in unit.read_text(encoding="utf-8").splitlines() if "=" in line)
    check(settings["ExecStart"].replace("/opt/fedloom/bin/", "").replace("%i", "north"))
    assert settings["User"] == "fedloom"
    assert settings["CapabilityBoundingSet"] == ""
    for name in ("NoNewPrivileges", "PrivateDevices", "ProtectHome", "RestrictNamespaces", "PrivateTmp"):
        assert settings[name] == "yes", name
    assert settings["ProtectSystem"] == "strict"
    assert settings["Restart"] == "always"


@pytest.mark.parametrize("name", PARTIES)
def test_the_compose_files_parties_are_hardened_and_call_commands_that_exist(name: str) -> None:
    service = PARTIES[name]
    check(shlex.join(["fedloom", "federation", *service["command"]]))
    assert (service["read_only"], service["user"], service["cap_drop"]) == (True, "65532:65532", ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "ports" not in service


def test_the_compose_file_is_a_server_and_three_silos() -> None:
    assert sorted(PARTIES) == ["server", "silo-1", "silo-2", "silo-3"]
    assert COMPOSE["networks"]["federation"]["internal"] is True
    assert COMPOSE["services"]["setup"]["network_mode"] == "none"


def test_the_charts_values_are_those_of_its_schema_and_its_templates_use_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values\.([\w.]+)", template.read_text(encoding="utf-8")):
            found: Any = values
            for part in path.split("."):
                assert part in found, f"{template.name}: {path}"
                found = found[part]


def test_the_chart_runs_its_party_as_nobody_with_a_read_only_root() -> None:
    text = (CHART / "templates" / "statefulset.yaml").read_text(encoding="utf-8")
    for line in (
        "runAsNonRoot: true",
        "readOnlyRootFilesystem: true",
        "allowPrivilegeEscalation: false",
        "drop: [ALL]",
        "automountServiceAccountToken: false",
        "type: RuntimeDefault",
        "replicas: 1",
    ):
        assert line in text, line
