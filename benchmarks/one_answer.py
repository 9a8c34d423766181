"""The equality tests of the fused engine on a GPU: every method, fused on CUDA against the reference on the CPU.

python benchmarks/one_answer.py [--device cuda] [--private]

Under DP-SGD the noise is drawn on the host, as the reference engine draws it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import keep, show
from engines.one_answer import (
    LARGER,
    METHODS,
    MIXED,
    PRIVATE,
    ROUNDS,
    UNEQUAL,
    assert_one_answer,
    config_of,
    trainer_of,
)
from fedloom.engines.fused import FusedOptions

CASES = [
    (name, federation, method, overrides)
    for name, federation in (("unequal", UNEQUAL), ("mixed groups", MIXED))
    for method, overrides in METHODS.items()
    if federation is UNEQUAL or "branches" not in method
]
PRIVATE_CASES = [
    (
        "larger",
        LARGER,
        f"{method}, {clipping}",
        (*PRIVATE, "rounds=4", f"privacy.clipping={clipping}", *METHODS[method]),
    )
    for method in ("fedvae", "+D", "+H+L+D", "fedprox", "convolutions", "fedgan")
    for clipping in ("fixed", "quantile")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--private", action="store_true", help="under DP-SGD")
    arguments = parser.parse_args()
    options = FusedOptions(torch.device(arguments.device), chunk=3, compiled=arguments.compiled, host_noise=True)
    rows = []
    for name, federation, method, overrides in PRIVATE_CASES if arguments.private else CASES:
        try:
            assert_one_answer(*trainer_of(config_of(*overrides), federation), ROUNDS, options)
            answer = "equal"
        except AssertionError as error:
            answer = f"DIFFERS: {str(error)[:80]}"
        rows.append({"federation": name, "method": method, "answer": answer})
    show(f"fused on {arguments.device} against reference on cpu", rows)
    keep(f"one_answer-{'private-' if arguments.private else ''}{arguments.device}", rows)
    sys.exit(any(row["answer"] != "equal" for row in rows))


if __name__ == "__main__":
    main()
