"""The Helm chart as a cluster gets it: rendered by Helm's library, and held to the schemas of Kubernetes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from documentation import check

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "fedloom"
TOOLS = ROOT / ".tools" / "bin"
RECORDS = {"silo": {"data": {"claim": "records", "path": "ct.npz"}, "serverCIDRs": ["192.0.2.0/24"]}}
RELEASES = {
    "server": ({"role": "server"}, ["NetworkPolicy", "Service", "StatefulSet"]),
    "silo": ({"role": "silo", **RECORDS}, ["NetworkPolicy", "StatefulSet"]),
    "silo of a node's path": ({"silo": {"data": {"hostPath": "/data"}}, "networkPolicy": False}, ["StatefulSet"]),
}


def rendered(values: dict[str, Any], chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    assert (TOOLS / "python").exists(), "call 'make .tools/.installed' first"
    command = [str(TOOLS / "python"), str(ROOT / "scripts" / "render_chart.py"), json.dumps(values), str(chart)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def objections(manifests: str, folder: Path) -> str:
    """What the schemas of Kubernetes have against manifests; empty where they are valid."""
    path = folder / "manifests.yaml"
    path.write_text(manifests)
    command = [str(TOOLS / "kubernetes-validate"), "--strict", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return found.stdout + found.stderr if found.returncode else ""


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_valid_and_calls_commands_that_exist(name: str, tmp_path: Path) -> None:
    values, kinds = RELEASES[name]
    found = rendered(values)
    assert found.returncode == 0, found.stderr
    assert objections(found.stdout, tmp_path) == ""
    documents = [each for each in yaml.safe_load_all(found.stdout) if each]
    assert sorted(each["kind"] for each in documents) == kinds
    pod = next(each for each in documents if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check(shlex.join(["fedloom", "federation", *container["args"]]))
    mounted = {volume["name"] for volume in pod["volumes"]} | {"folder"}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounted


REFUSED = {
    "no records": ({"role": "silo"}, "say where the silo's records are: silo.data.claim or silo.data.hostPath"),
    "no such role": ({"role": "both"}, "value must be one of 'server', 'silo'"),
    "no such value": ({"role": "server", "server": {"prot": 8443}}, "additional properties 'prot' not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_make_no_party_are_refused_in_words(name: str) -> None:
    values, reason = REFUSED[name]
    found = rendered(values)
    assert found.returncode == 1
    assert reason in found.stderr


WRONG = [("replicas: 1", "replicas: one"), ("      containers:", "      container:")]


@pytest.mark.parametrize(("line", "wrong"), WRONG)
def test_a_template_that_no_cluster_would_take_is_noticed(line: str, wrong: str, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "fedloom")
    template = tmp_path / "fedloom" / "templates" / "statefulset.yaml"
    text = template.read_text(encoding="utf-8")
    assert text.count(line) == 1
    template.write_text(text.replace(line, wrong), encoding="utf-8")
    found = rendered({"role": "server"}, tmp_path / "fedloom")
    assert found.returncode == 0, found.stderr
    assert objections(found.stdout, tmp_path) != ""
