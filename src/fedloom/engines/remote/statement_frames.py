"""The question what a run cost a silo's data, and its answer, as frames. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import fedloom
from fedloom.engines.remote.frames import STATE, STATEMENT, Frame
from fedloom.errors import FedloomError
from fedloom.privacy.statements import Bundle, Statement, bundle_of, canonical

BUNDLE, WORDS, SIGNED = "bundle", "words", "signed"  # parts


def question(bundle: Bundle) -> Frame:
    """What the server asks every silo alike; what others have answered is not in it."""
    asked = replace(bundle, keys={}, statements=())
    return Frame({"kind": STATE, "version": fedloom.__version__, "run": bundle.run}, {BUNDLE: asked.to_bytes()})


def bundle_in(frame: Frame) -> Bundle:
    """The bundle that a silo is asked for a statement for."""
    if frame.kind != STATE:
        raise FedloomError(f"a statement was not asked for: kind is '{frame.kind}'")
    return bundle_of(_part(frame, BUNDLE))


def words_frame(words: Mapping[str, Any]) -> Frame:
    """What a worker states: its node adds key and date, and signs."""
    return Frame({"kind": STATEMENT}, {WORDS: canonical(words)})


def words_in(frame: Frame) -> dict[str, Any]:
    """Read back what :func:`words_frame` made."""
    return _tree(frame, WORDS)


def statement_frame(statement: Statement) -> Frame:
    """What leaves a silo."""
    return Frame({"kind": STATEMENT}, {SIGNED: canonical(statement.to_mapping())})


def statement_in(frame: Frame) -> Statement:
    """Read back what :func:`statement_frame` made; a silo that states nothing says why."""
    if frame.kind != STATEMENT:
        raise FedloomError(str(frame.header.get("reason", f"it answered with a frame of kind '{frame.kind}'")))
    return Statement.of(_tree(frame, SIGNED))


def _part(frame: Frame, name: str) -> bytes:
    if set(frame.parts) != {name}:
        raise FedloomError(f"a frame of kind '{frame.kind}' has the parts {sorted(frame.parts)}, not '{name}' alone")
    return frame.parts[name]


def _tree(frame: Frame, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(_part(frame, name)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FedloomError(f"'{name}' is no table of plain values: {error}") from error
