"""Silos that share noise, and their server, in one process: every message, every signature, no sockets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.config import Config
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.grants import Grant
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.secure_frames import signed, words_to_sign
from fedloom.engines.remote.secure_rounds import SecureEngine
from fedloom.engines.remote.secure_silo import SecureSiloService
from fedloom.experiment import Experiment, Observer, Run
from fedloom.federation.records import Federation, Silo
from fedloom.privacy.signatures import fingerprint, public_line, sign
from fedloom.runs.folder import RunFolder
from fedloom.sharing.codec import flat
from labelled_vectors import CLASSES, labelled_config, vectors
from local_grid import Deployment, Handler, remote

SILOS = 5
SHARED = (
    "privacy.mechanism=dp-sgd",
    "privacy.epsilon=1.0",
    "privacy.delta=1e-5",
    "privacy.accountant=rdp",
    "privacy.trust=distributed",
    "privacy.tolerated=1",
)
SEEDED = "privacy.noise=test"
PROMPT = RoundRules(deadline=20.0, grace=0.2, minimum=1, extensions=0, attempts=1)


def five() -> Federation:
    silos = tuple(Silo(f"s{number}", vectors(number, 40 + number)) for number in range(SILOS))
    return Federation("vectors", silos, vectors(99), ("all",), CLASSES)


def grouped(*groups: tuple[int, ...]) -> Federation:
    """A silo for each; the records of one with several groups take turns."""
    silos = []
    for number, own in enumerate(groups):
        records = vectors(number, 40)
        records = replace(records, x=records.x.abs().clamp_max(1.0))
        silos.append(Silo(f"s{number}", replace(records, group=torch.tensor(own)[torch.arange(40) % len(own)])))
    test = replace(silos[0].train, group=torch.arange(40) % 2)
    return Federation("vectors", tuple(silos), test, ("a", "b"), CLASSES)


def shared_config(method: str, *overrides: str) -> Config:
    return labelled_config(method, *SHARED, *overrides)


def blocks_of(run: Run) -> dict[str, torch.Tensor]:
    """What the server has learned, by "block@owner/tensor"."""
    return flat("", run.generator().server.blocks)


@cache
def key_of(silo: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def fingerprints(silos: list[str]) -> dict[str, str]:
    return {silo: fingerprint(public_line(key_of(silo))) for silo in silos}


Meddling = Callable[[str, Frame], Frame | None]  # with a silo's question; nothing: the silo dies over it


@dataclass
class SecureDeployment(Deployment):
    """Silos under ``path`` that know each other's keys."""

    rules: RoundRules = PROMPT
    meddling: Meddling = lambda silo, frame: frame
    repeatable: bool = True
    asked: list[tuple[str, Frame]] = field(default_factory=list)  # all frames that silos were asked, in order
    answered: list[tuple[str, Frame]] = field(default_factory=list)

    def service(self, silo: int) -> Any:
        self.home(silo).mkdir(parents=True, exist_ok=True)
        name = self.federation.silos[silo].name
        others = [each.name for each in self.federation.silos if each.name != name]
        grant = Grant(math.inf, repeatable=self.repeatable, silos=fingerprints(others))
        agreement = (lambda *_: grant) if self.agreement is Deployment.agreement else self.agreement
        own = remote(self.federation, silo)
        found = SecureSiloService(
            self.home(silo),
            own,
            silo,
            self.screening,
            agreement,
            declared={s.name: len(s) for s in self.federation.silos},
        )
        return _Signing(self, name, found.answer)

    def run(self, folder: str = "server", name: str = "run-1", observer: Observer | None = None) -> Run:
        torch.set_num_threads(1)
        path, experiment = self.path / folder, Experiment.of(self.config, remote(self.federation))
        records = {silo.name: len(silo) for silo in self.federation.silos}
        keys = {silo: public_line(key_of(silo)) for silo in records}
        wire = FlowerWire(self.grid, poll=0.005)
        engine = SecureEngine(experiment.trainer, name, wire, self.rules, records, keys, self.events.append)
        if path.is_dir():
            return experiment.resume(RunFolder.open(path), observer=observer, engine=engine)
        return experiment.run(path, observer=observer, engine=engine)


@dataclass
class _Signing:
    """A silo with the process that holds its registered key before it."""

    place: SecureDeployment
    silo: str
    worker: Handler

    def answer(self, frame: Frame) -> Frame:
        self.place.asked.append((self.silo, frame))
        question = self.place.meddling(self.silo, frame)
        if question is None:
            raise ConnectionError("the silo was killed")
        answer = self.worker(question)
        if words := words_to_sign(answer):
            answer = signed(answer, sign(words, key_of(self.silo)))
        self.place.answered.append((self.silo, answer))
        return answer
