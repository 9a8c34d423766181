"""Pieces of a round as frames, and what came of them: plain values in the header, tensors as safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.engines.base import FederationState, Job, Result, SiloState
from fedloom.engines.pieces import RoundPart, Sum
from fedloom.engines.remote.frames import Frame
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import ServerState
from fedloom.privacy.noise import StreamNoise
from fedloom.sharing.codec import BLOCKS, flat, packed, parts, unpacked
from fedloom.sharing.plan import BlockKey
from fedloom.sharing.update import EgressRecord, Update
from fedloom.streams import Streams

ORDER, PARTS = "order", "parts"
Keep = Callable[[int, Sequence[str]], SiloState]  # what a silo has kept, elsewhere, under these names


def packed_blocks(state: ServerState) -> bytes:
    """All that silos may be sent, which is the same for every rank."""
    return packed(flat(BLOCKS, state.blocks))


def order(job: Job, pieces: Sequence[int], moved: Mapping[int, SiloState], blocks: bytes) -> Frame:
    """Pieces of a job, with what was kept of those silos whose tensors must move to the rank."""
    context = job.context
    header = {
        "kind": ORDER,
        "round": context.round,
        "rounds": context.rounds,
        "participants": list(context.participants),
        "pieces": list(pieces),
        "secrets": {str(silo): str(secret.streams.seed) for silo, secret in job.secrets.items()},
        "moved": list(moved),
    }
    states = {f"state/{silo}": packed(state.tensors) for silo, state in moved.items()}
    return Frame(header, {"blocks": blocks, **states})


def ordered(frame: Frame, kept: dict[int, SiloState], on_silo: Callable[[Result], None]) -> tuple[Job, list[int]]:
    """The job and its pieces; what has moved is added to what is ``kept`` here."""
    header = frame.header
    context = RoundContext(header["round"], header["rounds"], tuple(header["participants"]))
    blocks = parts(BLOCKS, unpacked(frame.parts["blocks"], "blocks"), BlockKey.of)
    secrets = {int(silo): StreamNoise(Streams(int(seed))) for silo, seed in header["secrets"].items()}
    kept |= {silo: SiloState(unpacked(frame.parts[f"state/{silo}"], "state")) for silo in header["moved"]}
    state = FederationState(context.round - 1, ServerState(blocks), kept)
    return Job(state, context, on_silo, secrets), list(header["pieces"])


def answer(made: Sequence[RoundPart]) -> Frame:
    """Parts without what their silos keep, of which only the names are told."""
    header, files = [], dict[str, bytes]()
    for part in made:
        facts: dict[str, Any] = {"piece": part.piece, "results": [_facts(result) for result in part.results]}
        for result in part.results:
            files[f"update/{result.silo}"] = packed(flat("", replace(result.update, coded={}).parts))
        facts["sums"] = [[str(key), weight] for key, weight, _ in part.sums]
        for number, (_, _, tensors) in enumerate(part.sums):
            files[f"sum/{part.piece}/{number}"] = packed(tensors)
        header.append(facts)
    return Frame({"kind": PARTS, "parts": header}, files)


def answered(frame: Frame, keep: Keep) -> list[RoundPart]:
    """The inverse of :func:`answer`."""
    found = []
    for facts in frame.header["parts"]:
        results = [_result(each, frame.parts[f"update/{each['silo']}"], keep) for each in facts["results"]]
        sums: list[Sum] = [
            (BlockKey.of(key), weight, unpacked(frame.parts[f"sum/{facts['piece']}/{number}"], key))
            for number, (key, weight) in enumerate(facts["sums"])
        ]
        found.append(RoundPart(facts["piece"], results, sums))
    return found


def _facts(result: Result) -> dict[str, Any]:
    return {
        "silo": result.silo,
        "name": result.update.silo,
        "round": result.update.round,
        "counts": dict(result.update.counts),
        "egress": result.egress.to_mapping(),
        "terms": dict(result.terms),
        "steps": result.steps,
        "seconds": result.seconds,
        "kept": list(result.state.source),
    }


def _result(facts: Mapping[str, Any], data: bytes, keep: Keep) -> Result:
    update = Update(facts["name"], facts["round"], {}, facts["counts"]).holding(
        parts("", unpacked(data, "an update"), str)
    )
    state = keep(facts["silo"], facts["kept"]) if facts["kept"] else SiloState()
    egress = EgressRecord.of_mapping(facts["egress"])
    return Result(facts["silo"], update, egress, state, facts["terms"], facts["steps"], facts["seconds"])
