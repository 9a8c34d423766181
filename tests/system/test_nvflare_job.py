"""fedloom as a job of an NVFlare federation that others run: a server and hardened sites, with their certificates."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.deployment.demo import write_records
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.nvflare.job import CONDUCTOR, EXECUTOR, SITE_CONFIG, write_job
from fedloom.deployment.nvflare.kit import harden
from fedloom.deployment.processes import Child, Household, free_port
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import RULES, charter_of, config_of, private
from support import equal_bits, wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not importlib.util.find_spec("nvflare"), reason="needs the extra 'nvflare'"),
]
ROUNDS = 12  # so many that an admin can abort the job in between
ADMIN, PLAIN = "admin@others.org", "plain"  # an admin who may do anything, and a site as NVFlare provisions it
BUILDERS = {
    "nvflare.lighter.impl.workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
    "nvflare.lighter.impl.static_file.StaticFileBuilder": {"config_folder": "config"},
    "nvflare.lighter.impl.cert.CertBuilder": {},
    "nvflare.lighter.impl.signature.SignatureBuilder": {},
}


@dataclass
class Others:
    """An NVFlare federation on loopback, whose sites but one have silos' folders and records."""

    folder: Path
    environment: dict[str, str]

    @property
    def kits(self) -> Path:
        return self.folder / "kits" / "others" / "prod_00"

    def provision(self, sites: list[str], port: int) -> None:
        parties: list[dict[str, Any]] = [
            {"name": "localhost", "type": "server", "org": "others", "fed_learn_port": port},
            {"name": ADMIN, "type": "admin", "org": "others", "role": "project_admin"},
            *({"name": site, "type": "client", "org": "hospitals"} for site in sites),
        ]
        project = {
            "api_version": 3,
            "name": "others",
            "description": "others",
            "participants": parties,
            "builders": [{"path": path, "args": args} for path, args in BUILDERS.items()],
        }
        (self.folder / "project.yml").write_text(json.dumps(project))  # which is YAML, too
        command = (sys.executable, "-m", "nvflare.cli", "provision", "-p", str(self.folder / "project.yml"))
        subprocess.run([*command, "-w", str(self.folder / "kits")], env=self.environment, check=True, timeout=120)
        local = self.kits / "localhost" / "local"
        told = (local / "resources.json.default").read_text().replace("/tmp/nvflare/", f"{self.folder}/store/")
        resources = json.loads(told)
        resources["class_allow_list"].append(CONDUCTOR)
        (local / "resources.json").write_text(json.dumps(resources))

    def admin(self, *orders: str) -> list[Any]:
        """What came of an admin's orders."""
        command = (sys.executable, str(Path(__file__).with_name("nvflare_admin.py")), str(self.kits / ADMIN), *orders)
        said = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=500, check=False, cwd=self.folder
        )
        assert said.returncode == 0, said.stdout + said.stderr
        return list(json.loads(said.stdout.splitlines()[-1]))


@contextlib.contextmanager
def standing(folder: Path, federation: Federation, policy: str) -> Iterator[Others]:
    folder.mkdir()
    environment = {**os.environ, "HOME": str(folder), "FEDLOOM_REGISTRY": str(folder / "registry")}
    others, household, port = Others(folder, environment), Household(), free_port()
    others.provision([*(silo.name for silo in federation.silos), PLAIN], port)

    def start(name: str, side: str, *settings: str) -> None:
        kit = others.kits / name
        module = f"nvflare.private.fed.app.{side}.{side}_train"
        command = (sys.executable, "-u", "-m", module, "-m", str(kit), "-s", f"fed_{side}.json", "--set")
        told = ("secure_train=true", "config_folder=config", *settings)
        household.add(Child(name, (*command, *told), folder / f"{name}.log", environment))

    def heard(name: str, words: str) -> bool:
        return words in (folder / f"{name}.log").read_text(errors="replace")

    start("localhost", "server", "org=others")
    try:
        for silo in federation.silos:
            home, data = folder / silo.name, folder / f"{silo.name}.npz"
            home.mkdir()
            (home / "policy.toml").write_text(policy)
            write_records(data, federation, silo.train, federation.test.of_group(silo.groups[0]))
            harden(others.kits / silo.name, home, data)
        sites = [PLAIN, *(silo.name for silo in federation.silos)]
        for site in sites:
            start(site, "client", f"uid={site}", "org=hospitals")
        for site in sites:
            wait_for(lambda site=site: heard(site, "Successfully registered"), f"{site} is registered", 120)
        yield others
    finally:
        household.stop()


def attacks(job: Path, folder: Path) -> Iterator[Path]:
    """The job with code for sites beside it, and with a class of NVFlare's that runs whatever it is told."""
    shutil.copytree(job, folder / "code")
    (folder / "code" / "sites" / "custom").mkdir()
    (folder / "code" / "sites" / "custom" / "evil.py").write_text("raise SystemExit\n")
    yield folder / "code"
    shutil.copytree(job, folder / "class")
    config = folder / "class" / "sites" / SITE_CONFIG
    config.write_text(config.read_text().replace(EXECUTOR, "nvflare.app_common.np.np_trainer.NPTrainer"))
    yield folder / "class"


def test_in_a_federation_of_others_sites_learn_what_the_reference_engine_learns_and_do_nothing_else(
    tmp_path: Path,
) -> None:
    noise = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "privacy.noise=test", "privacy.accountant=filter")
    silos = ("data.source=mnist-sample", "data.silos=3", "local.batch_size=8")
    config = config_of("method.name=fedvae", f"rounds={ROUNDS}", *silos, *noise)
    federation = build_federation(config.data, Streams(config.seed))
    assert len(federation.silos) == 3
    charter = charter_of(federation, "nvflare")
    train(config, tmp_path / "reference", federation)
    job = tmp_path / "job"
    write_job(HostedRun(config, charter, RULES, "runs/first"), job)
    site = federation.silos[0].name
    with standing(tmp_path / "others", federation, private(8.0, "test")) as others:
        run = others.folder / "runs" / "first"
        plain, hardened, code, other, aborted, done = others.admin(
            f"cat:{PLAIN}:startup/fed_client.json",
            f"cat:{site}:startup/fed_client.json",
            *(f"submit:{attack}" for attack in attacks(job, tmp_path)),
            f"abort:{job}:{run / 'metrics.jsonl'}",
            f"submit:{job}",
        )
        assert '"fqsn": "plain"' in plain  # an admin reads files at a site as NVFlare provisions it
        assert hardened == "invalid_request"
        for refused, reason in ((code, "custom/evil.py"), (other, f"its {SITE_CONFIG} is another")):
            assert refused["status"] == "FINISHED:FAILED_TO_RUN"
            details = [each for each in refused["job_deploy_detail"] if "this site runs fedloom's job alone" in each]
            assert len(details) == 3
            assert all(reason in each for each in details)
        logs = "".join(path.read_text(errors="replace")[-3000:] for path in others.folder.glob("*.log"))
        assert (aborted["status"], done["status"]) == ("FINISHED:ABORTED", "FINISHED:COMPLETED"), logs
    ours, theirs = load_checkpoint(run), load_checkpoint(tmp_path / "reference")
    assert ours.round == theirs.round == ROUNDS
    assert equal_bits(ours.server, theirs.server)
    assert RunFolder.open(run).environment["command"] == "nvflare job submit"
    for silo in federation.silos:
        (account,) = read_accounts(others.folder / silo.name / "ledger.sqlite")
        assert [(each.name, each.charges) for each in account.releases] == [("update", ROUNDS)]  # each paid for once
