"""What a silo's operator grants to experiments, and where they may train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.methods.base import Method
from fedloom.privacy.clipping import SMALLEST
from fedloom.privacy.silo_privacy import SiloPrivacy


@dataclass(frozen=True)
class Grant:
    """What an operator grants to experiments on the silo's data, all of them together."""

    epsilon: float  # infinite: spending is only counted
    delta: float = 0.0  # of the same lifetime; 0: the largest power of ten that is at most 1 / (10 n)
    unit: Literal["record", "subject"] = "record"  # whose coming or going the ledger keeps account of
    repeatable: bool = False  # noise from the experiment's seed, which protects nothing: for tests
    # Where the silo trains; "auto" is the CPU under DP-SGD, and noise is drawn there in any case.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    min_clip: float = SMALLEST  # the least clip bound of any step, also where it follows the records
    # Others, by the fingerprints of the keys under which this silo shares noise with them.
    silos: Mapping[str, str] = field(default_factory=dict)
    pace: float = 0.0  # seconds, at whole multiples of which an answer leaves that was paid for; 0: at once


Agreement = Callable[[Config, Method, SiloPrivacy | None], Grant]  # raises RefusedError for what was not agreed to
Screening = Callable[[Config], None]  # the same, before anything of an experiment is built


def training_device(wanted: str, *, private: bool) -> torch.device:
    """The device that a silo's operator chose.

    A GPU that meets an impossible value fails from then on, whatever it is asked for, and what a silo answers would say
    that a record made it. What is known to do so is kept away from it; for the rest private work stays on the CPU
    unless the operator says otherwise.
    """
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("policy.toml has device = 'cuda', but no CUDA device can be used here; use 'auto' or 'cpu'")
    return torch.device("cuda" if present and (wanted == "cuda" or (wanted == "auto" and not private)) else "cpu")
