"""What certificates in tests are about."""

from __future__ import annotations

import math
from typing import Any

from fedloom.certificate.matter import Matter, SignedFigure
from fedloom.privacy.summary import NONE
from fedloom.release.standing import Worth

ATTACK = '<script>alert(1)</script>&amp; "x" </p>'
SIGNED = tuple(SignedFigure(silo, "aaaa bbbb", "record", 1.0, 1e-5, "2026-03-01") for silo in ("east", "west"))


def matter(**changes: Any) -> Matter:
    """A run of two silos that have signed for epsilon 1 at delta 1e-5, with changes."""
    values: dict[str, Any] = {
        "run": "hospitals",
        "started": "2026-03-01",
        "method": "fedvae",
        "rounds": 2,
        "data": "the silos of federation fed",
        "public": False,
        "medical": False,
        "knows_subjects": False,
        "silos": ("east", "west"),
        "deployed": True,
        "blocks": ("encoder", "decoder"),
        "payloads": ("records",),
        "bytes": 4_096,
        "validation": False,
        "worth": Worth.SIGNED.value,
        "guarantee": "(1, 1e-05)-differential privacy for each record",
        "objections": (),
        "unit": "record",
        "trust": "local",
        "tolerated": 0,
        "epsilon": 1.0,
        "delta": 1e-5,
        "audit": (),
        "has_statements": True,
        "signed": SIGNED,
        "approvals": (),
        "checksums": {"checkpoints/round-0002/server.safetensors": "ab" * 32},
    }
    return Matter(**{**values, **changes})


def simulated(worth: Worth, **changes: Any) -> Matter:
    """The same on one machine."""
    return matter(**{"worth": worth.value, "deployed": False, "has_statements": False, "signed": (), **changes})


def unprotected(**changes: Any) -> Matter:
    """A run without any mechanism."""
    return simulated(Worth.NONE, **{"guarantee": NONE, "epsilon": math.inf, "delta": 0.0, **changes})
