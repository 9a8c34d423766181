"""The equality tests of the fused engine on a GPU: every method and packs, fused on CUDA against the
reference on the CPU.

python benchmarks/one_answer.py [--device cuda] [--private] [--compiled] [--lanes 2] [--federation even]

Under DP-SGD the noise is drawn on the host, as the reference engine draws it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import keep, show
from engines.one_answer import (
    EVEN,
    FISSION,
    LARGER,
    METHODS,
    MIXED,
    PRIVATE,
    ROUNDS,
    UNEQUAL,
    assert_one_answer,
    assert_same_rounds,
    config_of,
    lived_together,
    pack_of,
    rounds_of,
    trainer_of,
)
from fedloom.engines import fused_stack
from fedloom.engines.fused import FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import FedloomWarning
from fedloom.federation.records import Federation

CASES = [
    (name, federation, method, overrides)
    for name, federation in (("unequal", UNEQUAL), ("mixed groups", MIXED))
    for method, overrides in METHODS.items()
    if federation is UNEQUAL or "architectures" not in method  # which name silos of the other federation
]
CASES += [("even", EVEN, method, (*METHODS[method], "rounds=4")) for method in ("fedgan", "+D", "convolutions")]
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


# Several runs in one program against each alone, for which the reference engine stands.
PACKS = {
    "seeds": [("seed=1",), ("seed=2",), ("seed=1", "sharing.weights=equal-groups")],
    "methods and priors": [("seed=1",), (FISSION, "seed=2"), ("seed=3", *METHODS["+L"]), ("seed=1", *METHODS["+L+D"])],
    "private blocks": [(f"seed={seed}", *METHODS["private encoder, kept moments"]) for seed in (1, 2)],
    "two phases": [(f"seed={seed}", *METHODS["fedgan"]) for seed in (1, 2)],
    "unlike runs": [("seed=1",), ("seed=1", *METHODS["+H+L+D"]), ("seed=2",)],
}


def one_case(federation: Federation, overrides: tuple[str, ...], options: FusedOptions) -> None:
    assert_one_answer(*trainer_of(config_of(*overrides), federation), ROUNDS, options)


def one_crowded(overrides: tuple[str, ...], options: FusedOptions) -> None:
    """On a device without room for all records."""
    with mock.patch.object(fused_stack, "room_on", return_value=0.0):
        one_case(UNEQUAL, overrides, options)


def one_pack(runs: list[tuple[str, ...]], options: FusedOptions) -> None:
    """Each run has other participants in a round."""
    engine, members = pack_of(UNEQUAL, *runs, options=options)
    attendance = [ROUNDS[-turn:] + ROUNDS[:-turn] for turn in range(len(runs))]
    together = lived_together(engine, [start for _, start in members], attendance)
    for (trainer, start), attended, ours in zip(members, attendance, together, strict=True):
        assert_same_rounds(start, ours, rounds_of(ReferenceEngine(trainer), start, attended))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--lanes", type=int, default=0, help="silos one by one, so many side by side")
    parser.add_argument("--private", action="store_true", help="under DP-SGD")
    parser.add_argument("--federation", default="", help="only its cases, such as 'even', the one for compiled places")
    arguments = parser.parse_args()
    device, compiled, lanes = torch.device(arguments.device), arguments.compiled, arguments.lanes
    options = FusedOptions(device, chunk=3, compiled=compiled, lanes=lanes, host_noise=True)
    cases: list[tuple[str, str, Callable[[], None]]] = [
        (name, method, partial(one_case, federation, overrides, options))
        for name, federation, method, overrides in (PRIVATE_CASES if arguments.private else CASES)
    ]
    if not arguments.private:
        cases += [("unequal", f"packed: {name}", partial(one_pack, runs, options)) for name, runs in PACKS.items()]
        cases += [
            ("unequal", f"records sent chunk by chunk: {name}", partial(one_crowded, METHODS[name], options))
            for name in ("+D", "fedgan", "align_fl of four architectures")
        ]
    if arguments.federation:
        cases = [case for case in cases if case[0] == arguments.federation]
    variants = {"private": arguments.private, "compiled": compiled, "lanes": lanes > 0, arguments.federation: True}
    name = "-".join(["one_answer", *(variant for variant, asked in variants.items() if variant and asked)])
    rows: list[dict[str, Any]] = []
    for federation, method, case in cases:
        answer = "equal"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FedloomWarning)
            try:
                case()
            except AssertionError as error:
                answer = f"DIFFERS: {str(error)[:80]}"
            except Exception as error:  # the other cases are worth knowing all the same
                answer = f"FAILS: {type(error).__name__}: {str(error)[:200]}"
        warned = "; ".join(str(w.message)[:200] for w in said if issubclass(w.category, FedloomWarning))
        rows.append({"federation": federation, "method": method, "answer": answer, "warned": warned})
        keep(f"{name}-{arguments.device}", rows)
    show(f"fused on {arguments.device} against reference on cpu", rows)
    sys.exit(any(row["answer"] != "equal" for row in rows))


if __name__ == "__main__":
    main()
