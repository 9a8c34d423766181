"""The list of faults that privacy tests must catch: ``scripts/plant_faults.py`` plants them one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = json.loads((ROOT / "tests" / "planted_faults.json").read_text(encoding="utf-8"))


def test_every_fault_can_be_planted_and_names_a_test_that_is_there() -> None:
    """Whoever changes such a line or test changes the list with it, and plants the fault again."""
    assert len(FAULTS) > 400
    for fault in FAULTS:
        assert fault.keys() == {"file", "old", "new", "why", "test"}
        assert fault["old"] != fault["new"]
        assert (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) == 1, fault
        file, name = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[.*\])?", fault["test"]).groups()  # type: ignore[union-attr]
        assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), fault


def test_no_fault_is_listed_twice() -> None:
    changes = [(fault["file"], fault["old"], fault["new"]) for fault in FAULTS]
    assert len(set(changes)) == len(changes)
