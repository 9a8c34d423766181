"""Plant faults one by one in a copy of the source, and see that the test named beside each fails with it.

    python scripts/plant_faults.py [--only TEXT] [--workers 2]
    python scripts/plant_faults.py --list

``tests/planted_faults.json`` has the list: a file, an exact snippet that occurs in it once, what stands in its place
with the fault, why that is one, and the test. Exit code 1 where a fault goes unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "planted_faults.json"
SECONDS = 300  # a test that never ends has seen nothing
FAILED = 1  # pytest's exit code where tests ran and some failed; others mean that it could not run them


@dataclass(frozen=True)
class Fault:
    """A change that a test must not let through."""

    file: str
    old: str
    new: str
    why: str
    test: str

    @contextmanager
    def planted(self, tree: Path) -> Iterator[None]:
        """In this copy, for as long as it is entered."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.file} has this not once but {text.count(self.old)} times: {self.old}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        yield
        path.write_text(text, encoding="utf-8")


def faults() -> list[Fault]:
    """All that are listed."""
    return [Fault(**each) for each in json.loads(LIST.read_text(encoding="utf-8"))]


def code_of(tests: Sequence[str], tree: Path) -> int:
    """Pytest's exit code for these tests against the source of a tree."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 0


@contextmanager
def trees(count: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of source and tests to plant in."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            tree = Path(folder) / str(number)
            for name in ("src", "tests"):
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            for name in ("pyproject.toml", "README.md", "docs"):
                (tree / name).symlink_to(ROOT / name)
            free.put(tree)
        yield free


def main() -> None:
    """Plant what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show them and plant nothing")
    parser.add_argument("--only", default="", help="those whose file, reason or test has this text")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [fault for fault in faults() if arguments.only in f"{fault.file} {fault.why} {fault.test}"]
    if not chosen:
        sys.exit(f"no fault has the text {arguments.only!r}")
    if arguments.list:
        for fault in chosen:
            print(f"{fault.file}: {fault.why}\n    {fault.test}")
        return
    unseen = []
    with trees(arguments.workers) as free, ThreadPoolExecutor(arguments.workers) as pool:
        tree = free.get()
        if code := code_of(sorted({fault.test for fault in chosen}), tree):
            sys.exit(f"the tests do not pass without any fault (pytest's exit code {code})")
        free.put(tree)

        def seen(fault: Fault) -> bool:
            tree = free.get()
            with fault.planted(tree):
                code = code_of([fault.test], tree)
            free.put(tree)
            return code == FAILED

        for fault, found in zip(chosen, pool.map(seen, chosen), strict=True):
            print("seen  " if found else "UNSEEN", f"{fault.file}: {fault.why}", flush=True)
            unseen += [] if found else [fault]
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} planted faults were seen")
    sys.exit(bool(unseen))


if __name__ == "__main__":
    main()
