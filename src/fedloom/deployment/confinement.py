"""Processes of a silo with no more rights than each needs, by bubblewrap where it can be had.

A container would do the same. Without either a process has all rights of whoever started it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BASE = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--cap-drop", "ALL")
APART = ("--unshare-pid", "--unshare-ipc", "--die-with-parent")


@dataclass(frozen=True)
class Rights:
    """What a process may do beyond reading what its user can read."""

    writes: Sequence[Path] = ()  # files and folders
    only_reads: Sequence[Path] = ()  # inside of what it may write
    never_sees: Sequence[Path] = ()  # files that are empty for it, and folders
    network: bool = False


def confined(command: Sequence[str], rights: Rights) -> list[str]:
    """The command with these rights alone; as it is where bubblewrap is not there or does not work."""
    found = bubblewrap()
    if not found:
        return list(command)
    options = [*BASE, *APART, *(() if rights.network else ("--unshare-net",))]
    for path in rights.writes:
        options += ["--bind", str(path), str(path)]
    for path in rights.only_reads:
        options += ["--ro-bind", str(path), str(path)]
    for path in rights.never_sees:
        options += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    return [found, *options, "--", *command]


@cache
def bubblewrap() -> str:
    """The program, if it works here: containers and hardened systems may not allow what it does."""
    found = shutil.which("bwrap") or ""
    if found:
        tried = subprocess.run(
            [found, *BASE, *APART, "--unshare-net", "true"], check=False, capture_output=True, timeout=30
        )
        return found if tried.returncode == 0 else ""
    return ""
