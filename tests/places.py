"""A federation of three silos as processes of this machine, with TLS and keys, for tests that disturb it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import tomli_w

from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import Neighbourhood, running, settle
from fedloom.deployment.direct.conductor import DirectConductor
from fedloom.deployment.direct.serving import DirectServing
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.deployment.processes import Child
from fedloom.deployment.tail import resume_at, run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import FedloomError
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.privacy.registry import LedgerRegistry
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from support import equal_bits, tiny_config, wait_for

RULES = RoundRules(deadline=240.0, grace=200.0, minimum=1, extensions=0)
DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "local.batch_size=8", "privacy.accountant=filter")
METHODS = {
    "fissionvae-d": ("method.name=fissionvae",),
    "align-fl": ("method.name=align_fl", "server.samples=32", "server.epochs=1"),
    "moves in one byte": ("method.name=fissionvae", "sharing.compression=int8", "rounds=3"),
    "dp-sgd": ("method.name=fedvae", *DP),
}
POLICY = """\
methods = ["fedvae", "fissionvae", "align_fl"]
blocks = ["encoder", "decoder"]
privacy = "none"
noise = "test"
"""
DISHONEST = Path(__file__).parent / "system" / "dishonest"


def private(epsilon: float, noise: str) -> str:
    """A policy of silos that let nothing leave without DP-SGD, as far as its noise protects anything."""
    asked = POLICY if noise == "test" else POLICY.replace('"none"', '"dp-sgd"').replace('"test"', f'"{noise}"')
    return f"{asked}max_epsilon = {epsilon}\nmax_delta = 0.1\n"


def config_of(*overrides: str) -> Config:
    return tiny_config("engine.name=reference", "rounds=2", "data.silos=2", *overrides)


def charter_of(federation: Federation, wire: str) -> Charter:
    """Of an experiment in a federation that others run, whose silos have these records."""
    return Charter(
        name="theirs",
        silos={silo.name: federation.groups[silo.groups[0]] for silo in federation.silos},
        shape=federation.shape,
        modality=federation.modality.name,
        classes=federation.classes,
        records={silo.name: len(silo) for silo in federation.silos},
        wire=wire,
    )


def pid(child: Child) -> int:
    """Of a child itself, which may stand behind bubblewrap."""
    assert child.process is not None
    number = child.process.pid
    while Path(f"/proc/{number}/comm").read_text().strip() == "bwrap":
        (number,) = map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())
    return number


def asked_now(silo: Joining) -> bool:
    """Whether somebody has called the worker: beside its own door its host or the caller's lists a connection to it."""
    tables = (Path(f"/proc/{number}/net/unix").read_text() for number in ("self", pid(silo.worker)))
    door = str(silo._runtime / "worker")
    return len({line for table in tables for line in table.splitlines() if line.endswith(door)}) > 1


def halted(child: Child) -> bool:
    try:
        return Path(f"/proc/{pid(child)}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, ValueError):  # it is being started
        return False


@dataclass
class Place:
    """A running federation of three silos."""

    folder: Path
    federation: Federation
    place: Neighbourhood
    serving: DirectServing
    joined: list[Joining]
    said: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # nothing more is done to it

    def run(self, name: str, *overrides: str) -> Path:
        """A run, and beside it the reference's."""
        config = config_of(*overrides)
        if config.privacy.mechanism != "none":
            config = replace(config, privacy=replace(config.privacy, noise="test"))
        train(config, self.folder / f"{name}-reference", self.federation)
        return self.run_alone(name, *overrides)

    def run_alone(self, name: str, *overrides: str) -> Path:
        run_at(self.place.server, config_of(*overrides), self.folder / name, self.said.append)
        return self.folder / name

    def resume(self, name: str) -> None:
        resume_at(self.place.server, RunFolder.open(self.folder / name), self.said.append)

    def same(self, name: str) -> bool:
        ours, theirs = load_checkpoint(self.folder / name), load_checkpoint(self.folder / f"{name}-reference")
        return ours.round == theirs.round and equal_bits(ours.server, theirs.server)

    def own_name(self, name: str) -> str:
        """Under which silos know a run."""
        return str(RunFolder.open(self.folder / name).environment["engine_choice"]["run"])

    def participants(self, name: str) -> list[list[int]]:
        return [row["participants"] for row in RunFolder.open(self.folder / name).metrics()]

    def events(self, name: str, kind: str) -> list[tuple[int, str]]:
        rows = read_lines(self.folder / name / "silos.jsonl")
        return [(row["round"], row["silo"]) for row in rows if row["event"] == kind]

    def reasons(self, name: str, kind: str) -> list[str]:
        rows = read_lines(self.folder / name / "silos.jsonl")
        return [row.get("reason", "") for row in rows if row["event"] == kind]

    @contextlib.contextmanager
    def ruled(self, rules: RoundRules) -> Iterator[None]:
        """Other rules for the runs of a block: the server reads them at a run's start."""
        path = self.place.server.path / "federation.toml"
        before = path.read_text()
        tree = {"charter": self.place.server.charter.to_mapping(), "server": asdict(self.place.server.settings)}
        path.write_text(tomli_w.dumps(tree | {"rounds": asdict(rules)}))
        try:
            yield
        finally:
            path.write_text(before)

    @contextlib.contextmanager
    def agreeing(self, policy: str) -> Iterator[None]:
        """Another policy at every silo for a block, with ledgers that begin and end with it."""
        for home in self.place.silos:
            (home.path / "policy.toml").write_text(policy)
        try:
            yield
        finally:
            for home in self.place.silos:
                (home.path / "policy.toml").write_text(POLICY)
            with closing(LedgerRegistry(self.place.registry)) as registry:
                for entry in registry.entries():
                    registry.forget(entry.path)
                    entry.path.unlink()

    @contextlib.contextmanager
    def dishonest(self, silo: Joining, *damages: tuple[int, str]) -> Iterator[None]:
        """A worker that does something wrong in some rounds, once for each entry (dishonest/sitecustomize.py)."""
        plan = silo.home.path / "damages.json"  # where a worker may write
        plan.write_text(json.dumps(damages))
        honest = silo.worker.environment
        first = os.pathsep.join((str(DISHONEST), honest.get("PYTHONPATH", "")))
        silo.worker.environment = {**honest, "PYTHONPATH": first, "DAMAGES": str(plan)}
        try:
            self.start_again(silo)
            yield
            assert json.loads(plan.read_text()) == []  # everything was done
        finally:
            silo.worker.environment = honest
            self.start_again(silo)

    def start_again(self, silo: Joining) -> None:
        """End a silo's worker; it is started again by itself."""
        lives, silo.worker.pause = _lives(silo), 0.0
        os.kill(pid(silo.worker), signal.SIGKILL)
        wait_for(lambda: _lives(silo) > lives, f"the worker of silo '{silo.home.name}' comes back")

    def when(self, condition: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
        """Do something once, as soon as something is so."""

        def watch() -> None:
            wait_for(lambda: self.left.is_set() or condition(), "what a test waits for to disturb a run", 240)
            if not self.left.is_set():
                do()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def wait_until_all_are_there(self) -> None:
        def there() -> bool:
            try:
                known = DirectConductor(self.place.server).silos().values()
            except FedloomError:  # a server that is just being started again
                return False
            online = sum(silo["there"] == "online" for silo in known)
            return online == len(self.joined) and all(map(_lives, self.joined))

        wait_for(there, "all silos are there")


def refusal(home: SiloDirectory, data: Path) -> str:
    """What a silo says that cannot join."""
    said: list[str] = []

    def told(joining: Joining) -> bool:
        joining.tend()
        return any(line.startswith("node") for line in said)

    with Joining(home, data, said.append, apart=True) as joining:
        wait_for(lambda: told(joining), "the silo says that it cannot join")
        return "\n".join([*said, joining.node.last_words(5)])


def _lives(silo: Joining) -> int:
    """How often a silo's worker was ready."""
    return silo.worker.last_words(10**6).count("INFO ready")


class Ground:
    """Where a place stands: the same for all tests, until one has failed; the next one gets another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._built, self._stack = folder, 0, ExitStack()
        self._place: Place | None = None

    def place(self) -> Place:
        """With all silos there."""
        try:
            if self._place is None:
                self._built += 1
                self._place = self._stack.enter_context(standing(self._folder / str(self._built)))
            self._place.wait_until_all_are_there()
        except BaseException:
            self.leave()
            raise
        return self._place

    def leave(self) -> None:
        """Stop everything."""
        self._place = None
        self._stack.close()


@contextlib.contextmanager
def standing(folder: Path, federation: Federation | None = None) -> Iterator[Place]:
    """A federation, of three silos unless one is given, that is started, and stopped after the block."""
    config, said = config_of(), list[str]()
    if federation is None:
        whole = build_federation(config.data, Streams(config.seed))
        federation = replace(whole, silos=whole.silos[:3])
    found = settle(folder, federation, POLICY, RULES)
    with running(found, said.append) as (serving, joined):
        place = Place(folder, federation, found, serving, joined, said)
        try:
            yield place
        finally:
            place.left.set()
