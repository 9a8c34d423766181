"""What tests of several rooms use: a tiny configuration, tiny federations, runs compared bit for bit, and waiting."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedloom.config import Config, load_config
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import ServerRound, ServerState
from fedloom.privacy.gradient_forms import Form, Whole
from fedloom.runs.checkpoint import checkpoint_rounds, load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.runs.ledgers import LEDGER
from fedloom.sharing.aggregation import Aggregator
from fedloom.sharing.plan import SharingPlan
from fedloom.sharing.update import Update
from fedloom.streams import Streams


def script(name: str) -> ModuleType:
    """A script of the folder ``scripts`` as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What keeps methods small whose networks tiny_config does not shape.
NARROW: dict[str, tuple[str, ...]] = {
    "fission_flow": ("method.widths=[4, 8]", "method.blocks=1", "method.steps=2", "evaluation.samples=8"),
    "fedgan": ("model.channels=[4, 8]",),
}


def tiny_config(*overrides: str) -> Config:
    """Two groups of two silos, 40 records each, small networks: a round takes a few hundredths of a second."""
    small = (
        "rounds=2",
        "data.silos=2",
        "data.records_per_silo=40",
        "model.hidden=[16]",
        "model.latent=4",
        "local.batch_size=16",
        "evaluation.every=0",
        "evaluation.metrics=[]",
        "engine.workers=1",
        "engine.threads=1",
        "participation.rate=1.0",
    )
    return load_config("demo", [*small, *overrides])


def federation_of(*groups_of_records: Sequence[int], width: int = 6) -> Federation:
    """Groups "a", "b", ... and one silo for each sequence, which names the group of each of its records."""
    generator = torch.Generator().manual_seed(5)
    silos = []
    for number, groups in enumerate(groups_of_records):
        x = torch.rand(len(groups), width, generator=generator)
        silos.append(
            Silo(f"silo-{number}", Records(x, torch.zeros(len(groups), dtype=torch.int64), torch.tensor(groups)))
        )
    names = tuple("abcdef"[: 1 + max(max(groups) for groups in groups_of_records)])
    return Federation("tiny", tuple(silos), silos[0].train, names)


def round_of(
    state: ServerState,
    updates: Sequence[Update],
    context: RoundContext,
    streams: Streams,
    plan: SharingPlan | None = None,
) -> ServerRound:
    """What a server step is given; blocks are averaged where a ``plan`` says which."""
    merged = {} if plan is None else Aggregator().merged(updates, plan, {})
    return ServerRound(state, state, merged, updates, context, streams, torch.device("cpu"))


def written_out(values: Tensor, parameters: Mapping[str, Tensor]) -> Callable[[], dict[str, Form]]:
    """Every example's gradient from losses that share one graph; right where all of them are finite."""

    def forms() -> dict[str, Form]:
        rows = torch.autograd.grad(
            values, list(parameters.values()), torch.eye(len(values), dtype=values.dtype), is_grads_batched=True
        )
        return {name: Whole(row) for name, row in zip(parameters, rows, strict=True)}

    return forms


def names_in(folder: Path) -> list[str]:
    """What lies in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def logged(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The logs of a run without times and without checksums of what crossed a process."""
    folder = RunFolder.open(path)
    return {
        "metrics": [{k: v for k, v in row.items() if k != "seconds"} for row in folder.metrics()],
        "egress": [{k: v for k, v in row.items() if k != "sha256"} for row in folder.egress()],
    }


def grids(path: Path) -> dict[str, bytes]:
    """The sample grids of a run."""
    return {str(grid.relative_to(path)): grid.read_bytes() for grid in path.glob("samples/**/*.png")}


def assert_same_run(one: Path, other: Path) -> None:
    """Every checkpoint tensor, every logged number and every sample grid of two runs is the same, to the bit."""
    assert logged(one) == logged(other)
    assert grids(one) == grids(other)
    assert checkpoint_rounds(one) == checkpoint_rounds(other)
    for number in checkpoint_rounds(one):
        ours, theirs = load_checkpoint(one, number), load_checkpoint(other, number)
        own = {LEDGER: None}  # every run has a ledger of its own
        assert ours.facts | own == theirs.facts | own
        assert equal_bits(ours.server, theirs.server)
        assert ours.silos.keys() == theirs.silos.keys()
        assert all(equal_bits(ours.silos[name], theirs.silos[name]) for name in ours.silos)


def wait_for(condition: Callable[[], Any], what: str = "what a test waits for", seconds: float = 150.0) -> Any:
    """What the condition gives once it is true; the test fails if that does not come about in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} seconds"
        time.sleep(0.05)
    return found
