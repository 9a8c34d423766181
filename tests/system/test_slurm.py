"""Sweeps as jobs of a SLURM of one node: Debian's munged, slurmctld and slurmd, on the loopback and under this user."""

from __future__ import annotations

import getpass
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedloom.experiment import train
from fedloom.runs.folder import RunFolder
from fedloom.sweep import read_sweep
from support import assert_same_run, tiny_config, wait_for

pytestmark = pytest.mark.system
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def _ports() -> list[int]:
    """Two that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands find it."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    assert not missing, f"install Debian's slurmctld, slurmd, slurm-client and munge; {missing[0]} is not there"
    if os.geteuid():
        pytest.skip("slurmd is for root")
    home = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket lies in it
    for name in ("state", "spool", "munge"):
        (home / name).mkdir(mode=0o700)
    home.chmod(0o755)
    (home / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (home / "munge" / "key").chmod(0o400)
    file = home / "slurm.conf"
    words = {"host": platform.node().partition(".")[0], "user": getpass.getuser(), "home": home, "ports": _ports()}
    file.write_text(CONFIGURATION.format(**words), encoding="utf-8")
    files = {"key-file": "munge/key", "log-file": "munge/log", "seed-file": "munge/seed", "pid-file": "munge/pid"}
    munge = [f"--{name}={home / path}" for name, path in {**files, "socket": "munge.socket"}.items()]
    environment = {**os.environ, "SLURM_CONF": str(file)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D", "-i", "-f", str(file)],
            ["slurmd", "-D", "-f", str(file)],
        ):
            with (home / f"{command[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            if command[0] == "munged":
                wait_for((home / "munge.socket").exists, "munged")
        wait_for(lambda: "idle" in _asked(environment, "sinfo", "--noheader"), "SLURM")
        yield environment
        _asked(environment, "scancel", f"--user={getpass.getuser()}")  # of a test that failed half-way
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(timeout=30)
        shutil.rmtree(home, ignore_errors=True)


def _asked(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A sweep of two seeds that take some seconds each."""
    (tmp_path / "base.toml").write_text(
        tiny_config("rounds=60", "engine.checkpoint_every=1").to_toml(), encoding="utf-8"
    )
    file = tmp_path / "sweep.toml"
    file.write_text('base = "base.toml"\n[grid]\nseed = [1, 2]\n', encoding="utf-8")
    return file


def _begun(environment: dict[str, str], file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedloom", "sweep", str(file), "--out", str(file.parent / "out")]
    options = ["--on", "slurm", "--jobs", "1", "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *options], env=environment, stdout=pipe, stderr=pipe, text=True)


def _run(environment: dict[str, str], file: Path) -> tuple[int, str, str]:
    process = _begun(environment, file)
    out, said = process.communicate(timeout=300)
    return process.returncode, out, said


def _at_work(environment: dict[str, str]) -> list[str]:
    return _asked(environment, "squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()


def test_a_sweep_is_an_array_that_is_waited_for_again_and_asked_for_once(slurm: dict[str, str], swept: Path) -> None:
    process = _begun(slurm, swept)
    wait_for(lambda: _at_work(slurm), "a job")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "jobs that were submitted go on" in said
    code, out, said = _run(slurm, swept)
    assert code == 0, said
    assert "jobs are under way from before" in said
    assert "submitted to slurm" not in said
    trials = json.loads(out)["trials"]
    assert {name: trial["state"] for name, trial in trials.items()} == {"seed-1": "finished", "seed-2": "finished"}
    for trial in read_sweep(swept):  # what a job trained has the bits of what is trained here
        here = train(trial.config, swept.parent / "here" / trial.name).folder.path
        assert_same_run(swept.parent / "out" / trial.name, here)
    shutil.rmtree(swept.parent / "out" / "seed-2")
    code, _, said = _run(slurm, swept)
    assert code == 0, said
    assert said.count("submitted to slurm") == 1
    assert said.count(" is over: ") == 1
    assert " is over: seed-2" in said


def test_a_job_that_died_is_one_sentence_and_its_run_goes_on(slurm: dict[str, str], swept: Path) -> None:
    endless = tiny_config("rounds=20000", "engine.checkpoint_every=1")
    (swept.parent / "base.toml").write_text(endless.to_toml(), encoding="utf-8")
    swept.write_text('base = "base.toml"\n[grid]\nseed = [1]\n', encoding="utf-8")
    process, run = _begun(slurm, swept), swept.parent / "out" / read_sweep(swept)[0].name
    wait_for(lambda: run.is_dir() and RunFolder.open(run).rounds_done, "a round that is kept")
    (job,) = _at_work(slurm)
    subprocess.run(["scancel", "--signal=KILL", job], env=slurm, check=True)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert said.splitlines()[-1].startswith(f"Error: job {job} of {run.name} ended without a result")
    done, again = RunFolder.open(run).rounds_done, _begun(slurm, swept)
    wait_for(lambda: RunFolder.open(run).rounds_done > done, "another round")
    subprocess.run(["scancel", *_at_work(slurm)], env=slurm, check=True)
    again.send_signal(signal.SIGINT)
    assert again.wait(timeout=60) == 130


def test_a_job_that_is_cut_off_is_queued_again_and_goes_on(slurm: dict[str, str], swept: Path) -> None:
    swept.write_text('base = "base.toml"\n[grid]\nseed = [1]\n', encoding="utf-8")
    (trial,) = read_sweep(swept)
    process, run = _begun(slurm, swept), swept.parent / "out" / trial.name
    wait_for(lambda: run.is_dir() and RunFolder.open(run).rounds_done, "a round that is kept")
    (job,) = _at_work(slurm)
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm, check=True)  # as SLURM does before a time limit
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count("submitted to slurm") == 1
    assert "Requeued job" in (swept.parent / "out" / "jobs" / f"{job}_0_log.out").read_text(encoding="utf-8")
    assert_same_run(run, train(trial.config, swept.parent / "here").folder.path)
