"""Jobs by submitit as processes of this machine, and what SLURM's commands are asked; SLURM itself is a system test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from cli.conftest import invoke
from fedloom import cluster
from fedloom.cluster import Cluster, JobCall
from fedloom.errors import FedloomError

pytest.importorskip("submitit")


def silent(_: str) -> None:
    """Nobody listens."""


def test_jobs_of_this_machine_return_what_they_did(tmp_path: Path) -> None:
    heard: list[str] = []
    calls = [JobCall((name,), partial(dict, {name: {"process": number}})) for number, name in enumerate("abc")]
    (tmp_path / "jobs").mkdir()
    old = tmp_path / "jobs" / "77_0_result.pkl"
    old.touch()  # of a process whose number may come again
    found = Cluster("local", tmp_path / "jobs", at_once=2).carry_out(calls, heard.append)
    assert not old.exists()
    assert found == {"a": {"process": 0}, "b": {"process": 1}, "c": {"process": 2}}
    submitted = [line for line in heard if line.startswith("submitted to local")]
    assert len(submitted) > 1  # two at a time
    assert submitted[0].count(",") == 1


def test_a_job_that_died_is_one_sentence_after_the_others_have_ended(tmp_path: Path) -> None:
    calls = [
        JobCall(("wrong",), partial(divmod, 1, 0)),
        JobCall(("dead",), partial(os._exit, 3)),
        JobCall(("kept",), dict),
    ]
    heard: list[str] = []
    with pytest.raises(FedloomError) as caught:
        Cluster("local", tmp_path / "jobs", at_once=1).carry_out(calls, heard.append)
    sentence = str(caught.value)
    assert "of wrong ended without a result (ZeroDivisionError: integer division or modulo by zero); see" in sentence
    assert sentence.endswith("(and 1 more); the same command asks for what is missing")
    assert [line.rpartition(" ")[2] for line in heard if "is over" in line] == ["wrong", "dead", "kept"]


SQUEUE = """#!/bin/sh
cat {queue} 2>/dev/null || true
"""
SBATCH = """#!{python}
import pathlib, subprocess, sys
text = pathlib.Path(sys.argv[-1]).read_text()
with open("{asked}", "a") as file:
    file.write(text + "\\n")
if "partition=nowhere" in text:
    sys.exit("sbatch: error: invalid partition specified: nowhere")
print("Submitted batch job 17")
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands by SLURM's names that carry out nothing: a job waits for as long as ``queue`` names it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    words = {"queue": tmp_path / "queue", "asked": tmp_path / "asked", "python": sys.executable}
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text.format(**words), encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(cluster, "GRACE", 0.05)
    monkeypatch.setitem(cluster.PAUSE, "slurm", 0.02)
    return tmp_path


def test_what_is_asked_of_slurm_and_a_job_that_left_the_queue_without_a_result(slurm: Path) -> None:
    options = {"gpus": "1", "time": "90", "partition": "gpu"}
    calls = [JobCall((name,), partial(dict)) for name in "abc"]
    with pytest.raises(FedloomError, match=r"job 17_0 of a ended without a result; see .* \(and 2 more\); the same"):
        Cluster("slurm", slurm / "jobs", at_once=2, sbatch=options).carry_out(calls, silent)
    asked = (slurm / "asked").read_text(encoding="utf-8").splitlines()
    assert {"#SBATCH --array=0-2%2", "#SBATCH --gpus=1", "#SBATCH --time=90", "#SBATCH --partition=gpu"} <= set(asked)
    with pytest.raises(FedloomError, match=r"^no job could be submitted to slurm: .*nowhere"):
        Cluster("slurm", slurm / "jobs", sbatch={"partition": "nowhere"}).carry_out(calls, silent)


def test_what_is_under_way_is_waited_for_and_not_asked_for_again(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "GRACE", 60.0)
    folder, queue = slurm / "jobs", slurm / "queue"
    folder.mkdir()
    (folder / cluster.RECORD).write_text(json.dumps({"16_0": ["a"], "16_1": ["b"], "15": ["old"]}), encoding="utf-8")
    queue.write_text("16_0\n16_1\n99\n", encoding="utf-8")
    results = {"16_0": {"a": 1}, "16_1": {"b": 2}}

    def say(line: str) -> None:
        if "under way" in line:  # then they leave the queue, and what they return is seen a little later
            assert line == "2 jobs are under way from before"
            queue.write_text("99\n", encoding="utf-8")
            Timer(0.2, lambda: [_result(folder, job, result) for job, result in results.items()]).start()

    calls = [JobCall(("a", "b"), partial(dict))]  # a pack that has other runs now
    assert Cluster("slurm", folder).carry_out(calls, say) == {"a": 1, "b": 2}
    assert not (slurm / "asked").exists()
    assert json.loads((folder / cluster.RECORD).read_text(encoding="utf-8")) == {}


def _result(folder: Path, job: str, result: dict[str, int]) -> None:
    """What submitit's own process leaves of a job that ended well."""
    import cloudpickle

    (folder / f"{job}_0_result.pkl").write_bytes(cloudpickle.dumps(("success", ("", result))))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """A sweep that is refused in one sentence."""
    file = tmp_path / "sweep.toml"
    file.write_text('base = "demo"\n[grid]\nseed = [1, 2]\n', encoding="utf-8")

    def call(*arguments: str) -> str:
        result = invoke("sweep", file, "--out", tmp_path / "out", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.count("\n") == 1
        return result.stderr

    return call


def test_mistakes_are_one_sentence(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--sbatch gpus must be KEY=VALUE" in refused("--on", "slurm", "--sbatch", "gpus")
    assert "say --on slurm or --on local" in refused("--jobs", "2")
    assert "--sbatch is for --on slurm" in refused("--on", "local", "--sbatch", "gpus=1")
    result = invoke("reproduce", "fissionvae/table1", "--on", "local", "--workers", "2")
    assert (result.exit_code, "--workers and --minutes are for this process" in result.stderr) == (2, True)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "'sbatch' is not on this machine's PATH" in refused("--on", "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install 'fedloom[cluster]'" in refused("--on", "local")
