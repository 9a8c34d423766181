"""The noise of a private simulation: keyed by its secret and by all that defines a query, to each silo its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.one_answer import (
    CONVOLUTIONS,
    DISTIL,
    LARGER,
    METHODS,
    PRIVATE,
    assert_same_rounds,
    config_of,
    trainer_of,
)
from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, Result, SiloState, initial_state
from fedloom.engines.charging import Charging
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_noise import DeviceNoise, HostNoise
from fedloom.engines.fused_stack import Member, stacks_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.noise import NoiseKey, StreamNoise, keyed
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.sharing.plan import BlockKey
from support import assert_same_run, equal_bits, federation_of

CPU = torch.device("cpu")
SECURE = (*PRIVATE, "privacy.noise=secure")
DECODER = BlockKey("decoder", "all")
OWN_ENCODER = "sharing.scopes.encoder=silo"
WITH_PAYLOAD = ("method.name=align_fl", *DISTIL, "server.latents=histogram", "server.components=8")


@dataclass(frozen=True)
class Query:
    """All that defines what is asked of the silos of a run."""

    config: Config
    federation: Federation
    state: FederationState
    round: int = 1
    source: str = ""
    secret: bytes = b"a run's secret"

    def keys(self, folder: Path, participants: tuple[int, ...] = (0, 1)) -> dict[int, int]:
        """Silo -> the key of its coins and noise; each time with a new ledger."""
        trainer = Experiment.of(self.config, self.federation).trainer
        path = folder / f"{len(list(folder.iterdir()))}.sqlite"
        with closing(Charging(trainer, path, self.secret)) as charging:
            context = RoundContext(self.round, self.config.rounds, participants)
            return {
                silo: noise.streams.seed
                for silo, noise in charging.admitted(self.state, context, self.source)[1].items()
            }


def first_query() -> Query:
    """Of two silos with the very same records, who have kept the same encoder."""
    one, other = federation_of([0] * 40, [0] * 40).silos
    federation = replace(federation_of([0] * 40), silos=(one, replace(other, train=one.train)))
    config = config_of(*SECURE, OWN_ENCODER)
    experiment = Experiment.of(config, federation)
    state = initial_state(experiment.method, federation, config)
    kept = SiloState({"model/encoder.layers.0.bias": torch.zeros(16)})
    return Query(config, federation, replace(state, silos={0: kept, 1: kept}))


def at_the_server(change: Callable[[Tensor], Tensor]) -> Callable[[Query], Query]:
    def changed(query: Query) -> Query:
        server = query.state.server
        (name, tensor), *_ = sorted(server.blocks[DECODER].items())
        block = server.blocks[DECODER] | {name: change(tensor)}  # type: ignore[operator]
        return replace(query, state=replace(query.state, server=replace(server, blocks={DECODER: block})))

    return changed


def at_the_first_silo(kept: dict[str, Tensor]) -> Callable[[Query], Query]:
    return lambda query: replace(query, state=replace(query.state, silos=query.state.silos | {0: SiloState(kept)}))  # type: ignore[operator]


def with_setting(override: str) -> Callable[[Query], Query]:
    return lambda query: replace(query, config=config_of(*SECURE, OWN_ENCODER, override))


def with_another_number(tensor: Tensor) -> Tensor:
    """The last one, by the least that there is."""
    changed = tensor.clone()
    changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(9.0))
    return changed


def with_another_record(query: Query) -> Query:
    one, other = query.federation.silos
    train = replace(one.train, x=with_another_number(one.train.x))
    return replace(query, federation=replace(query.federation, silos=(replace(one, train=train), other)))


BIAS = torch.zeros(16)
OF_ALL: dict[str, Callable[[Query], Query]] = {
    "another round": lambda query: replace(query, round=2),
    "another secret": lambda query: replace(query, secret=b"another secret"),
    "another source": lambda query: replace(query, source="/cuda/2"),
    "another seed": with_setting("seed=7"),
    "another setting": with_setting("local.learning_rate=0.5"),
    "another weight": at_the_server(with_another_number),
    "weights of another shape": at_the_server(lambda t: t.reshape(1, -1)),
    "weights of another dtype": at_the_server(lambda t: t.view(torch.int32)),
}
OF_ONE: dict[str, Callable[[Query], Query]] = {
    "another record": with_another_record,
    "nothing kept": at_the_first_silo({}),
    "another number kept": at_the_first_silo({"model/encoder.layers.0.bias": with_another_number(BIAS)}),
    "kept by another name": at_the_first_silo({"model/encoder.layers.2.bias": BIAS}),
    "more is kept": at_the_first_silo({"model/encoder.layers.0.bias": BIAS, "clip-bound/vae": torch.ones(())}),
}


def test_all_that_defines_a_query_changes_its_noise_and_nothing_else_does(tmp_path: Path) -> None:
    query = first_query()
    keys = query.keys(tmp_path)
    assert keys[0] != keys[1], "alike in all but who they are"
    assert query.keys(tmp_path) == keys, "the same query, in whatever ledger"
    assert query.keys(tmp_path, (1,)) == {1: keys[1]}, "whoever else takes part"
    assert query.keys(tmp_path, (1, 0)) == keys
    seen = {*keys.values()}
    for change in OF_ALL.values():
        seen |= {*change(query).keys(tmp_path).values()}
    assert len(seen) == 2 + 2 * len(OF_ALL)
    for change in OF_ONE.values():
        found = change(query).keys(tmp_path)
        assert found[1] == keys[1], "its own query is the same"
        seen.add(found[0])
    assert len(seen) == 2 + 2 * len(OF_ALL) + len(OF_ONE)


def test_a_run_without_a_secret_of_its_own_draws_from_the_seed_and_says_so_to_the_ledger(tmp_path: Path) -> None:
    """As is asked for with noise = "test"; what it released is not what a run with a secret did."""
    query = first_query()
    query = replace(query, config=config_of(*PRIVATE, OWN_ENCODER))
    trainer = Experiment.of(query.config, query.federation).trainer
    charged = []
    for secret in (None, b"a secret", b"a secret", None):
        with closing(Charging(trainer, tmp_path / "ledger.sqlite", secret)) as charging:
            _, secrets = charging.admitted(query.state, RoundContext(1, 2, (0,)))
            assert (secrets[0] == trainer.seeded) == (secret is None)
            charged.append(charging._ledger._value("SELECT count(*) FROM charges"))
    assert charged == [1, 2, 2, 2]


def test_a_round_done_again_from_anything_else_is_another_release(tmp_path: Path) -> None:
    """Its noise is its own, so that both are paid for; from the same, with the same secret, it is the same one."""
    query = first_query()
    changes = [at_the_server(with_another_number), *(change for name, change in OF_ONE.items() if "record" not in name)]
    states = [query.state, *(change(query).state for change in changes)]
    trainer = Experiment.of(query.config, query.federation).trainer
    for times in (1, 2):
        for paid, state in enumerate(states, start=1):
            with closing(Charging(trainer, tmp_path / "ledger.sqlite", query.secret)) as charging:
                charging.admitted(state, RoundContext(1, 2, (0,)))
                assert len(charging._ledger.events("silo-0")) == (paid if times == 1 else len(states))


def test_a_run_draws_from_the_secret_in_its_folder_and_from_nothing_else(tmp_path: Path) -> None:
    """With another one's secret a run is the same to the bit."""
    query, runs = first_query(), list[Path]()
    for number, secret in enumerate((bytes(32), bytes(32), bytes(31) + b"1")):
        life = Experiment.of(query.config, query.federation).begin(tmp_path / str(number))
        (life.folder.path / "noise.key").write_bytes(secret)
        runs.append(life.run_alone().path)
    assert_same_run(runs[0], runs[1])
    one, other = (load_checkpoint(path).server for path in runs[1:])
    assert not any(torch.equal(tensor, other[name]) for name, tensor in one.items())


ENGINES: dict[str, Callable[[Trainer], ReferenceEngine | FusedEngine]] = {
    "reference": ReferenceEngine,
    "fused": lambda trainer: FusedEngine(trainer, FusedOptions(CPU, chunk=3)),
}


def secrets_of(*silos: int, by: str = "") -> dict[int, StreamNoise]:
    return {silo: keyed(b"secret", f"{silo}{by}") for silo in silos}


@pytest.mark.parametrize(
    "overrides",
    [
        METHODS["private encoder, kept moments"],
        METHODS["flow_vae with a refiner"],
        ("method.name=fedgan", CONVOLUTIONS),  # its generator, which sees no record, draws from the seed
        WITH_PAYLOAD,
    ],
    ids=["one phase", "two phases", "an open phase", "payloads"],
)
def test_engines_draw_alike_from_the_secrets_that_they_are_given(overrides: tuple[str, ...]) -> None:
    trainer, start = trainer_of(config_of(*SECURE, *overrides), LARGER)
    lived = []
    for engine_of in ENGINES.values():
        heard = list[Result]()
        context, secrets = RoundContext(1, 9, (0, 1, 3)), secrets_of(0, 1, 3)
        state, report = engine_of(trainer).round(Job(start, context, heard.append, secrets))
        lived.append((state, [report], heard))
    assert_same_rounds(start, lived[1], lived[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_silo_draws_from_its_own_secret_and_from_no_other(engine: str) -> None:
    """What stays at it, and what it sends beside its blocks."""
    trainer, start = trainer_of(config_of(*SECURE, *WITH_PAYLOAD, OWN_ENCODER), LARGER)
    usual, found = secrets_of(0, 1, 3), []
    for secrets in (usual, usual | secrets_of(1, by="another")):
        heard = list[Result]()
        ENGINES[engine](trainer).round(Job(start, RoundContext(1, 1, (0, 1, 3)), heard.append, secrets))
        found.append({result.silo: result for result in heard})
    one, other = found
    for silo in (0, 1, 3):
        same = silo != 1
        assert equal_bits(dict(one[silo].state.tensors), dict(other[silo].state.tensors)) == same
        assert equal_bits(one[silo].update.payloads["latents"], other[silo].update.payloads["latents"]) == same  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_private_round_is_not_begun_without_a_secret(engine: str) -> None:
    """Nor where some silos have theirs; a trial, of which nothing is kept, needs none."""
    trainer, start = trainer_of(config_of(*SECURE), LARGER)
    for secrets in ({}, secrets_of(0)):
        with pytest.raises(FedloomError, match="was begun without a secret for its noise"):
            ENGINES[engine](trainer).round(Job(start, RoundContext(1, 1, (0, 1)), lambda _: None, secrets))
    assert trainer.randomness(None, trial=True) == trainer.seeded


def members() -> list[Member]:
    trainer, _ = trainer_of(config_of(*SECURE), LARGER)
    (stack,) = stacks_of((trainer,), CPU)
    return sorted(stack.members, key=lambda member: member.index)[:2]


def test_silos_that_draw_on_a_device_have_noise_of_their_own_secret_alone() -> None:
    """Whoever draws beside them."""
    one, other, third = (secrets_of(0, by=text)[0] for text in "abc")

    def drawn(*secrets: StreamNoise) -> list[Tensor]:
        rooms = [torch.zeros(2, 30)]
        DeviceNoise(members(), secrets, 1, rooms, CPU).draw(2)
        return list(rooms[0])

    first, second = drawn(one, other)
    assert torch.equal(drawn(one, third)[0], first)
    assert torch.equal(drawn(third, other)[1], second)
    seen = {tuple(row.tolist()) for secrets in ([one, other], [other, one], [third, third]) for row in drawn(*secrets)}
    assert len(seen) == 6


def test_silos_that_draw_one_by_one_draw_as_the_plain_loop_does() -> None:
    """Each from its own secret, by its own number, for each phase of each step."""
    rooms, secrets = [torch.zeros(2, 30), torch.zeros(2, 20)], [*secrets_of(0, 1).values()]
    source = HostNoise(members(), secrets, 4, rooms)
    for step in range(3):
        source.draw(2)
        for phase, room in enumerate(rooms):
            for silo, row in enumerate(room):
                assert torch.equal(row, secrets[silo].normal(len(row), NoiseKey(silo, 4, 2 * step + phase)))
