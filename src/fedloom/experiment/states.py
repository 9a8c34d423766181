"""The state of a federation as a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedloom.config import Config
from fedloom.engines.base import FederationState, SiloState
from fedloom.engines.local_state import MODEL
from fedloom.federation.records import Federation
from fedloom.methods.steps import ServerState
from fedloom.privacy.accounts import Chain
from fedloom.runs.checkpoint import Checkpoint
from fedloom.runs.ledgers import ledger_facts
from fedloom.sharing.codec import AVERAGES, BLOCKS, MEMORY, flat, parts, placed, under
from fedloom.sharing.plan import BlockKey, Tensors


def checkpoint_of(
    config: Config,
    federation: Federation,
    state: FederationState,
    chosen: tuple[int, ...],
    charges: Chain | None = None,
) -> Checkpoint:
    """What is kept of a state after a round in which these silos took part, and of the ledger that was charged."""
    known = state.server
    server = flat(BLOCKS, known.blocks) | flat(AVERAGES, known.averages) | placed(MEMORY, known.memory)
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
        **(ledger_facts(charges) if charges else {}),
    }
    silos = {federation.silos[i].name: state.silos[i].source for i in sorted(state.silos)}
    return Checkpoint(state.round, server, silos, facts)


def server_state(checkpoint: Checkpoint) -> ServerState:
    """The server's part of a checkpoint."""
    blocks, averages = (parts(prefix, checkpoint.server, BlockKey.of) for prefix in (BLOCKS, AVERAGES))
    return ServerState(blocks, under(MEMORY, checkpoint.server), averages)


def restored(checkpoint: Checkpoint, federation: Federation) -> FederationState:
    """A checkpoint as the state it was made from."""
    number = federation.numbers_of(checkpoint.silos)
    silos = {number[name]: SiloState(tensors) for name, tensors in checkpoint.silos.items()}
    return FederationState(checkpoint.round, server_state(checkpoint), silos)


class KeptModels(Mapping[str, Tensors]):
    """What silos keep of their models, by silo and parameter name; looked up one silo at a time."""

    def __init__(self, state: FederationState, federation: Federation) -> None:
        self._kept = {federation.silos[index].name: kept for index, kept in state.silos.items()}

    def __getitem__(self, silo: str) -> Tensors:
        return under(MODEL, self._kept[silo].tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
