"""The state of a federation as a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedloom.config import Config
from fedloom.engines.base import FederationState, SiloState
from fedloom.engines.training import MODEL
from fedloom.federation.records import Federation
from fedloom.methods.steps import ServerState
from fedloom.runs.checkpoint import AVERAGES, BLOCKS, MEMORY, Checkpoint
from fedloom.sharing.plan import BlockKey, Tensors


def checkpoint_of(
    config: Config, federation: Federation, state: FederationState, chosen: tuple[int, ...]
) -> Checkpoint:
    """What is kept of a state after a round in which these silos took part."""
    server: Tensors = {f"{BLOCKS}{k}/{n}": t for k, part in state.server.blocks.items() for n, t in part.items()}
    server |= {f"{AVERAGES}{k}/{n}": t for k, part in state.server.averages.items() for n, t in part.items()}
    server |= {f"{MEMORY}{name}": tensor for name, tensor in state.server.memory.items()}
    facts = {
        "config": config.digest(),
        "streams": {"seed": config.seed},
        "participants": list(chosen),
        "federation": federation.digest,
        "setting": {
            "modality": federation.modality.name,
            "shape": list(federation.shape),
            "groups": list(federation.groups),
            "classes": list(federation.classes),
        },
    }
    silos = {federation.silos[i].name: state.silos[i].source for i in sorted(state.silos)}
    return Checkpoint(state.round, server, silos, facts)


def server_state(checkpoint: Checkpoint) -> ServerState:
    """The server's part of a checkpoint."""
    memory = {n.removeprefix(MEMORY): t for n, t in checkpoint.server.items() if n.startswith(MEMORY)}
    return ServerState(_blocks(BLOCKS, checkpoint.server), memory, _blocks(AVERAGES, checkpoint.server))


def _blocks(prefix: str, tensors: Mapping[str, Tensor]) -> dict[BlockKey, Tensors]:
    blocks: dict[BlockKey, Tensors] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            key, _, parameter = name.removeprefix(prefix).rpartition("/")
            blocks.setdefault(BlockKey.of(key), {})[parameter] = tensor
    return blocks


def restored(checkpoint: Checkpoint, federation: Federation) -> FederationState:
    """A checkpoint as the state it was made from."""
    number = {silo.name: index for index, silo in enumerate(federation.silos)}
    silos = {number[name]: SiloState(tensors) for name, tensors in checkpoint.silos.items()}
    return FederationState(checkpoint.round, server_state(checkpoint), silos)


class KeptModels(Mapping[str, Tensors]):
    """What silos keep of their models, by silo and parameter name; looked up one silo at a time."""

    def __init__(self, state: FederationState, federation: Federation) -> None:
        self._kept = {federation.silos[index].name: kept for index, kept in state.silos.items()}

    def __getitem__(self, silo: str) -> Tensors:
        return {n.removeprefix(MODEL): t for n, t in self._kept[silo].tensors.items() if n.startswith(MODEL)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
