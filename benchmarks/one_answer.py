"""The equality tests of the fused engine on a GPU: every method, fused on CUDA against the reference on the CPU.

python benchmarks/one_answer.py [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import keep, show
from engines.one_answer import METHODS, MIXED, ROUNDS, UNEQUAL, assert_one_answer, config_of, trainer_of
from fedloom.engines.fused import FusedOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for federation, name in ((UNEQUAL, "unequal"), (MIXED, "mixed groups")):
        for method, overrides in METHODS.items():
            if federation is MIXED and "branches" in method:
                continue
            options = FusedOptions(torch.device(arguments.device), chunk=3, compiled=arguments.compiled)
            try:
                assert_one_answer(*trainer_of(config_of(*overrides), federation), ROUNDS, options)
                answer = "equal"
            except AssertionError as error:
                answer = f"DIFFERS: {str(error)[:80]}"
            rows.append({"federation": name, "method": method, "answer": answer})
    show(f"fused on {arguments.device} against reference on cpu", rows)
    keep(f"one_answer-{arguments.device}", rows)
    sys.exit(any(row["answer"] != "equal" for row in rows))


if __name__ == "__main__":
    main()
