"""The silo's worker: torch and the records stay loaded, and one task after the other is answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedloom.config import Config
from fedloom.deployment.approvals import approvals_objection
from fedloom.deployment.charter import load_records
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.link import DEVICE
from fedloom.deployment.policy import Policy
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.grants import Grant, training_device
from fedloom.engines.remote.secure_silo import SecureSiloService
from fedloom.engines.remote.silo import SiloService
from fedloom.engines.remote.work import RefusedError
from fedloom.methods.base import Method
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.registry import allow_only

log = logging.getLogger(__name__)


def service(home: SiloDirectory, data: Path, source: str = "") -> SiloService:
    """The silo with its records, held to its policy as the file says at each task."""

    def refuse(objection: str) -> None:
        if objection:
            raise RefusedError(f"silo '{home.name}' does not agree: {objection}")

    def policy() -> Policy:
        found = home.policy()
        allow_only(found.plugins)  # whatever a task names, here nothing else is imported for it
        return found

    def screening(config: Config) -> None:
        found = policy()
        refuse(found.first_objection(config))
        refuse(approvals_objection(home, found, config.digest()))

    def agreement(config: Config, method: Method, plan: SiloPrivacy | None) -> Grant:
        found = policy()
        refuse(found.objection(config, method, plan))
        return found.grant

    policy()
    charter = home.invitation.charter
    federation = charter.at_a_silo(home.name, load_records(data, source, charter.modality))
    return SecureSiloService(
        home.path, federation, charter.index(home.name), screening, agreement, declared=charter.records
    )


def answering(folder: Path, data: Path, source: str = "") -> Callable[[Frame], Frame]:
    """How this process answers whatever a silo is asked; it stays as it is prepared here."""
    # Numbers below 1.2e-38 take many times as long, and whoever sets weights can have a single record make them. This
    # comes before torch has other threads, which take it over from the one that starts them.
    torch.set_flush_denormal(True)
    torch.backends.cudnn.allow_tf32 = False  # a silo with a GPU computes in float32 as the others do
    home = SiloDirectory.open(folder)
    found = service(home, data, source)

    def answer(frame: Frame) -> Frame:
        if frame.kind == DEVICE:
            return Frame({"kind": DEVICE, "device": device_of(home.policy())})
        start = time.perf_counter()
        answered = found.answer(frame)
        seconds = time.perf_counter() - start
        asked = f"round {frame.header['round']}" if "round" in frame.header else frame.kind
        log.info("%s: %s after %.3f seconds", asked, answered.kind, seconds)
        return answered

    return answer


def device_of(policy: Policy) -> str:
    """What a person is told of where a silo trains."""
    device = training_device(policy.device, private=policy.privacy == "dp-sgd")
    return f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
