"""A whole federation on this machine: the embedded sample, one process or more for each silo, TLS and keys as ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.deployment.confinement import bubblewrap
from fedloom.deployment.direct.serving import DirectServing
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.deployment.processes import free_port
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation, Records
from fedloom.runs.files import write_atomically
from fedloom.streams import Streams

TICK = 0.5  # seconds between two looks at what runs
POLICY = """\
# Agrees to what the demonstration runs, which is not private.
methods = ["{method}"]
blocks = [{blocks}]
payloads = [{payloads}]
privacy = "none"
"""


@dataclass(frozen=True)
class Neighbourhood:
    """A server and silos in folders of one machine, ready to be started."""

    server: ServerDirectory
    silos: tuple[SiloDirectory, ...]
    data: tuple[Path, ...]
    registry: Path  # of their ledgers, apart from the user's own


def settle(
    folder: Path,
    federation: Federation,
    policy: str,
    rules: RoundRules,
    *,
    public: bool = False,
    address: str = "",
) -> Neighbourhood:
    """Found a federation of silos in simulation: each gets its own records as a file, a key, and an admission.

    Its server is on this machine alone, unless silos reach it at an ``address``.
    """
    listen = address.rpartition(":")[2]
    address = address or f"127.0.0.1:{free_port()}"
    groups = {silo.name: federation.groups[silo.groups[0]] for silo in federation.silos}
    charter = Charter(
        name="demo",
        address=address,
        silos=groups,
        shape=federation.shape,
        modality=federation.modality.name,
        classes=federation.classes,
        records={silo.name: len(silo) for silo in federation.silos},
    )
    public_set = folder / "public.npz"
    settings = ServerSettings(listen=listen or address, public_set=str(public_set.resolve()) if public else "")
    server = ServerDirectory.create(folder / "server", charter, settings, rules)
    if public:
        write_records(public_set, federation, federation.test, federation.test)
    homes, files = [], []
    for silo in federation.silos:
        home = SiloDirectory.create(
            folder / silo.name, Invitation.read(server.path / "invitations" / f"{silo.name}.toml")
        )
        write_atomically(home.path / "policy.toml", policy.encode())
        server.admit(home.public_key)
        files.append(folder / f"{silo.name}.npz")
        held_out = federation.test.of_group(silo.groups[0])
        write_records(files[-1], federation, silo.train, held_out)
        homes.append(home)
    return Neighbourhood(server, tuple(homes), tuple(files), folder / "registry")


def write_records(path: Path, federation: Federation, train: Records, test: Records) -> None:
    """Records as an .npz file that says what they are by name."""
    groups, classes = np.array(federation.groups), np.array((*federation.classes, ""))
    arrays = {"modality": np.array(federation.modality.name)}
    for split, records in (("train", train), ("test", test)):
        arrays[f"x_{split}"] = records.x.numpy()
        arrays[f"group_{split}"] = groups[records.group.numpy()]
        if federation.classes:
            arrays[f"y_{split}"] = classes[records.y.numpy()]
        if records.subject is not None:
            arrays[f"subject_{split}"] = records.subject.numpy()
    np.savez(path, **arrays)  # type: ignore[arg-type]


@contextmanager
def running(
    place: Neighbourhood, say: Callable[[str], None], *, apart: bool | None = None
) -> Iterator[tuple[DirectServing, list[Joining]]]:
    """All its processes, looked after in the background, until the block ends; see ``Joining`` for ``apart``."""
    walls = bool(bubblewrap()) if apart is None else apart
    with ExitStack() as stack:
        server = stack.enter_context(DirectServing(place.server, say))
        joined = [
            stack.enter_context(Joining(home, data, say, place.registry, apart=walls))
            for home, data in zip(place.silos, place.data, strict=True)
        ]
        over = threading.Event()

        def tend() -> None:
            while not over.wait(TICK):
                server.tend()
                for each in joined:
                    each.tend()

        watch = threading.Thread(target=tend, daemon=True)
        watch.start()
        try:
            yield server, joined
        finally:
            over.set()
            watch.join()


def demonstrate(folder: Path, config: Config, say: Callable[[str], None]) -> Path:
    """Found a federation of the embedded sample, run an experiment on it, stop everything; returns the run's folder."""
    federation = build_federation(config.data, Streams(config.seed))
    place = settle(folder, federation, policy_for(config, federation), RoundRules(), public=True)
    say(f"{len(place.silos)} silos and a server, each a process of its own with a folder of its own in {folder}")
    with running(place, say):
        run_at(place.server, config, folder / "run", say)
    return folder / "run"


def policy_for(config: Config, federation: Federation) -> str:
    """A policy that agrees to one experiment."""
    plan = Experiment.of(config, federation).method.plan
    return POLICY.format(
        method=config.method.name,
        blocks=_listed(name for name, rule in plan.blocks.items() if rule.up),
        payloads=_listed(payload.name for payload in plan.payloads),
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
