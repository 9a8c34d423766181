"""Work as jobs, by submitit: of a SLURM cluster, or processes of this machine; nothing under way is asked for twice.

submitit keeps what a job is given and returns as pickles in the folder of jobs: whoever may write there may run code.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError, FedloomError, MissingExtraError
from fedloom.runs.files import explained, write_json

NEEDED = ("sbatch", "srun", "squeue")
MINUTES = 1440  # of a job, unless somebody says; one that is cut off goes on from its last checkpoints
PAUSE = {"slurm": 2.0, "local": 0.2}  # seconds between two looks
GRACE = 20.0  # seconds after a job has left the queue until its result must be there: file systems are slow
RECORD = "jobs.json"


@dataclass(frozen=True)
class JobCall:
    """What one job does; it says of each name what came of it."""

    names: tuple[str, ...]
    work: Callable[[], Mapping[str, Any]]


class Resumable:
    """A call as submitit takes it: one that is cut off by a time limit, or preempted, is begun again and goes on."""

    def __init__(self, work: Callable[[], Mapping[str, Any]]) -> None:
        """The call's work, which finds by itself what is done already."""
        self.work = work

    def __call__(self) -> tuple[str, Mapping[str, Any]]:
        """Do it; what went wrong is said first, in a line."""
        try:
            return "", self.work()
        except Exception as error:
            return f"{type(error).__name__}: {error}", {}

    def checkpoint(self, *_: Any) -> Any:
        """What is submitted in place of the job that was cut off."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class Cluster:
    """Where jobs go, and what is asked of each."""

    where: str  # "slurm" or "local"
    folder: Path  # of what jobs are given, return and say; every node must see it
    at_once: int = 0  # jobs at the same time; 0: as many as the cluster takes, here as there are cores
    sbatch: Mapping[str, str] = field(default_factory=dict)  # options of sbatch, such as partition or gpus

    def carry_out(self, calls: Sequence[JobCall], say: Callable[[str], None]) -> dict[str, Any]:
        """Have everything done that is not under way, wait for all of it, and return what came of each name."""
        executor = self._executor()
        running = self._under_way()
        taken = {name for names in running.values() for name in names}
        waiting = [call for call in calls if not taken.intersection(call.names)]
        if running:
            say(f"{len(running)} jobs are under way from before")
        found: dict[str, Any] = {}
        lost: list[str] = []
        left: dict[Any, float] = {}  # jobs that are over without a result, and since when
        try:
            while waiting or running:
                waiting = self._submit(executor, waiting, running, say)
                for job in self._over(running, left):
                    names = running.pop(job)
                    complaint, came = _outcome(job, names)
                    lost += [complaint] if complaint else []
                    found |= came
                    say(f"job {job.job_id} is over: {', '.join(names)}")
                    self._record(running)
                if running:
                    time.sleep(PAUSE[self.where])
        except KeyboardInterrupt:
            if self.where == "local":
                for job in running:
                    job.cancel()
            raise
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise FedloomError(f"{lost[0]}{more}; the same command asks for what is missing")
        return found

    def _executor(self) -> Any:
        if self.where == "slurm" and (missing := [name for name in NEEDED if not shutil.which(name)]):
            raise ConfigError(
                f"--on slurm needs SLURM's commands, and '{missing[0]}' is not on this machine's PATH; call it where "
                "they are, or say --on local"
            )
        try:
            import submitit
        except ImportError as error:
            raise MissingExtraError(
                f"--on {self.where} needs the package '{error.name}'; install it with: pip install 'fedloom[cluster]'"
            ) from error
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.where == "local":  # its jobs go by the numbers of processes, which come again
            for old in self.folder.glob("*_result.pkl"):
                old.unlink()
        executor = submitit.AutoExecutor(self.folder, cluster=self.where)
        minutes = int(self.sbatch["time"]) if self.sbatch.get("time", "").isdecimal() else MINUTES
        rest = {key: value for key, value in self.sbatch.items() if key != "time" or not value.isdecimal()}
        executor.update_parameters(name="fedloom", timeout_min=minutes)
        if self.where == "slurm":
            executor.update_parameters(slurm_additional_parameters=rest)
            if self.at_once:
                executor.update_parameters(slurm_array_parallelism=self.at_once)
        elif gpus := _gpus():
            executor.update_parameters(gpus_per_node=gpus)
        return executor

    def _submit(
        self, executor: Any, waiting: Sequence[JobCall], running: dict[Any, Sequence[str]], say: Callable[[str], None]
    ) -> list[JobCall]:
        """Ask for what there is room for; returns the rest."""
        room = len(waiting)
        if self.where == "local":
            room = min(room, max(0, (self.at_once or os.cpu_count() or 1) - len(running)))
        if not room:
            return list(waiting)
        now, rest = waiting[:room], list(waiting[room:])
        try:
            with executor.batch():  # one array
                jobs = [executor.submit(Resumable(call.work)) for call in now]
        except Exception as error:  # submitit shows what sbatch said by exceptions of several kinds
            said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise FedloomError(f"no job could be submitted to {self.where}: {said[-1].strip()}") from error
        running |= {job: call.names for job, call in zip(jobs, now, strict=True)}
        self._record(running)
        say(f"submitted to {self.where}: {', '.join(job.job_id for job in jobs)}; {self.folder} has what they say")
        return rest

    def _record(self, running: Mapping[Any, Sequence[str]]) -> None:
        """Which jobs are under way, for whoever calls the command again meanwhile."""
        jobs = {job.job_id: list(names) for job, names in running.items()} if self.where == "slurm" else {}
        write_json(self.folder / RECORD, jobs)

    def _under_way(self) -> dict[Any, Sequence[str]]:
        """Jobs of an earlier call that are queued or at work; those of this machine ended with it."""
        if self.where != "slurm" or not (self.folder / RECORD).is_file():
            return {}
        from submitit import SlurmJob

        known = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        queued = _queued()
        return {SlurmJob(self.folder, job): names for job, names in known.items() if job in queued}

    def _over(self, running: Mapping[Any, Sequence[str]], left: dict[Any, float]) -> list[Any]:
        """Jobs with a result, and those that will have none."""
        if self.where == "local":
            return [job for job in running if job.done()]
        ended = [job for job in running if job.paths.result_pickle.exists()]
        open_ones = [job for job in running if job not in ended]
        queued, now = _queued() if open_ones else set[str](), time.monotonic()
        for job in open_ones:
            if job.job_id in queued:
                left.pop(job, None)
            elif now - left.setdefault(job, now) > GRACE:
                ended.append(job)
        return ended


def _queued() -> set[str]:
    """Jobs of this user that wait or are at work, by number; those of an array one by one."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (subprocess.SubprocessError, OSError) as error:
        raise FedloomError(
            f"SLURM does not answer ({' '.join(command)} failed); jobs that were submitted go on, and the same command "
            "waits for them"
        ) from error
    return set(done.stdout.split())


def _outcome(job: Any, names: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Why there is nothing of a job, if so, and what there is."""
    said, found = "", dict[str, Any]()
    if job.paths.result_pickle.exists():
        if (error := job.exception()) is None:
            said, found = job.result()
        else:
            said = type(error).__name__
        if not said:
            return "", found
    elif lines := [line.strip() for line in (job.stderr() or "").splitlines() if line.strip()]:
        said = lines[-1]
    last = f" ({said})" if said else ""
    return f"job {job.job_id} of {', '.join(names)} ended without a result{last}; see {job.paths.stderr}", {}


def _gpus() -> int:
    """How many GPUs this machine has: submitit hides those that are not asked for."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()
