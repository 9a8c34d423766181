"""The same seed gives the same result as the reference engine, whatever stays at a silo and whatever leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import Config
from fedloom.engines.remote.round_store import RoundStore
from fedloom.engines.remote.silo import Grant
from fedloom.engines.remote.work import experiment_in
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation, Records, Silo
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from local_grid import Deployment, Handler
from support import NARROW, equal_bits, names_in, tiny_config

DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "privacy.accountant=filter")
ALIGN = ("method.name=align_fl", "server.samples=32", "server.epochs=1")
CASES = {
    "group decoders": ("method.name=fissionvae", "rounds=3", "participation.rate=0.6"),
    "private encoder and moments": ("sharing.scopes={encoder='silo'}", "local.keep_optimizer=true"),
    "dp-sgd": (*DP, "local.batch_size=8"),
    "labelled images": ("method.name=class_vae",),
    "labelled images from a flow": (
        "method.name=fission_flow",
        "method.told=['group', 'label']",
        *NARROW["fission_flow"],
    ),
    "noisy counts of classes": ("method.name=class_vae", *DP, "local.batch_size=8"),
    "trimmed mean": ("method.name=fedvae", "server.merge.name=trimmed-mean", "sharing.weights=equal"),
    "bounded moves": ("server.merge.name=norm-bound", "server.merge.bound=0.2", "participation.rate=0.6"),
    "moves in one byte": (
        "method.name=fissionvae",
        "sharing.compression=int8",
        "rounds=3",
        "participation.rate=0.6",
        "server.merge.name=median",
        "sharing.weights=equal",
    ),
    "moves in two bytes under dp-sgd": (*DP, "local.batch_size=8", "sharing.compression=bfloat16", "rounds=3"),
    "align-fl": ALIGN,
    "private payloads": (*ALIGN, "server.latents=histogram", "server.components=3", *DP, "local.batch_size=8"),
}


def reference_and_deployed(tmp_path: Path, config: Config) -> Deployment:
    """The reference run in ``reference``, the deployed one in ``server``, both with noise that can be repeated."""
    if config.privacy.mechanism != "none":
        config = replace(config, privacy=replace(config.privacy, noise="test"))
    federation = build_federation(config.data, Streams(config.seed))
    train(config, tmp_path / "reference", federation)
    deployment = Deployment(tmp_path, config, federation)
    deployment.run()
    return deployment


def rows(path: Path, name: str) -> list[dict[str, Any]]:
    """A log without times and checksums."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "sha256")} for row in read_lines(path / name)]


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_the_server_learns_what_the_reference_engine_learns(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    reference_and_deployed(tmp_path, tiny_config("engine.name=reference", *overrides))
    ours, theirs = load_checkpoint(tmp_path / "server"), load_checkpoint(tmp_path / "reference")
    assert ours.round == theirs.round
    assert ours.facts["participants"] == theirs.facts["participants"]
    assert equal_bits(ours.server, theirs.server)
    assert ours.silos == {}, "what silos keep is theirs"
    steps = [[row["steps"] for row in rows(tmp_path / place, "metrics.jsonl")] for place in ("server", "reference")]
    assert steps[0] == steps[1]
    assert rows(tmp_path / "server", "egress.jsonl") == rows(tmp_path / "reference", "egress.jsonl")


@pytest.mark.parametrize("method", ["moments", "refined_moments"])
def test_sums_are_of_as_many_records_as_silos_say_where_none_were_declared(tmp_path: Path, method: str) -> None:
    """Nothing is averaged, so the numbers weigh nobody: they are how many records the sums in the payloads are of."""
    generator = torch.Generator().manual_seed(7)

    def records(count: int) -> Records:
        x, y = torch.rand(count, 4, generator=generator), torch.arange(count) % 2
        return Records(x, y, torch.zeros(count, dtype=torch.int64))

    silos = tuple(Silo(f"silo-{count}", records(count)) for count in (20, 30, 60))
    federation = Federation("vectors", silos, records(10), ("all",), ("a", "b"))
    config = tiny_config("engine.name=reference", f"method.name={method}", "rounds=3")
    train(config, tmp_path / "reference", federation)
    Deployment(tmp_path, config, federation, declared=False).run()
    ours, theirs = load_checkpoint(tmp_path / "server"), load_checkpoint(tmp_path / "reference")
    assert equal_bits(ours.server, theirs.server)


def test_a_group_decoder_is_sent_to_its_group_alone(tmp_path: Path) -> None:
    config = tiny_config("engine.name=reference", "method.name=fissionvae")
    deployment = Deployment(tmp_path, config, build_federation(config.data, Streams(config.seed)))
    sent: dict[str, set[str]] = {}

    def looking(name: str, handler: Handler) -> Handler:
        return lambda frame: (sent.setdefault(name, set()).update(frame.parts), handler(frame))[1]

    for name, handler in deployment.grid.handlers.items():
        deployment.grid.handlers[name] = looking(name, handler)
    deployment.run()
    groups = ("mnist", "mnist", "fashion-mnist", "fashion-mnist")
    assert [sent[silo.name] for silo in deployment.federation.silos] == [
        {"encoder@all", f"decoder@group={group}"} for group in groups
    ]


def test_what_silos_keep_stays_with_them(tmp_path: Path) -> None:
    config = tiny_config("engine.name=reference", *CASES["private encoder and moments"])
    deployment = reference_and_deployed(tmp_path, config)
    theirs = load_checkpoint(tmp_path / "reference").silos
    assert len(theirs) == 4
    for number, silo in enumerate(deployment.federation.silos):
        kept = RoundStore(deployment.home(number) / "rounds" / "run-1").state_before(config.rounds + 1)
        assert equal_bits(kept.tensors, theirs[silo.name])


def test_a_silo_reads_an_experiment_once_however_many_rounds_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All silos are in this process, and have the text of the one experiment; each opens its own report once."""
    opened, opening = list[Path](), RunFolder.open
    monkeypatch.setattr(RunFolder, "open", lambda path: opened.append(path) or opening(path))
    experiment_in.cache_clear()
    config = tiny_config("method.name=fissionvae", "rounds=4")
    deployment = Deployment(tmp_path, config, build_federation(config.data, Streams(config.seed)))
    deployment.run()
    silos = len(deployment.federation)
    assert (experiment_in.cache_info().misses, experiment_in.cache_info().hits) == (1, 4 * silos - 1)
    reports = [deployment.home(silo) / "runs" / "run-1" for silo in range(silos)]
    assert sorted(path for path in opened if path in reports) == sorted(reports)


def test_losses_are_in_the_reports_of_silos_alone(tmp_path: Path) -> None:
    deployment = reference_and_deployed(tmp_path, tiny_config("engine.name=reference"))
    at_server = rows(tmp_path / "server", "metrics.jsonl")
    assert [sorted(row) for row in at_server] == [["participants", "round", "steps"]] * 2
    kept = {"checkpoints", "egress.jsonl", "environment.json", "metrics.jsonl", "run.toml", "samples", "status.json"}
    kept |= {"verdict.json"}  # of what the server knows: without a public set it says why there is none
    assert set(names_in(tmp_path / "server")) == kept
    at_silos = [rows(deployment.home(n) / "runs" / "run-1", "metrics.jsonl") for n in range(4)]
    for number, row in enumerate(rows(tmp_path / "reference", "metrics.jsonl")):
        assert sum(own[number]["steps"] for own in at_silos) == row["steps"]
        for term in (key for key in row if key.startswith("train/")):
            mean = sum(own[number][term] * own[number]["steps"] for own in at_silos) / row["steps"]
            assert mean == pytest.approx(row[term], rel=1e-6)


def test_every_silo_pays_in_its_own_ledger_what_it_pays_in_a_simulation(tmp_path: Path) -> None:
    """The same but for what the records are known by, which a silo's ledger must not tell who can guess them."""
    config = tiny_config("engine.name=reference", *CASES["dp-sgd"])
    federation = build_federation(config.data, Streams(config.seed))
    train(config, tmp_path / "reference", federation)
    deployment = Deployment(tmp_path, config, federation, agreement=lambda *_: Grant(8.0))
    deployment.run()
    theirs = {account.silo: account for account in read_accounts(tmp_path / "reference" / "ledger.sqlite")}
    for number, silo in enumerate(federation.silos):
        (ours,) = read_accounts(deployment.home(number) / "ledger.sqlite")
        assert replace(ours, data=silo.digest) == theirs[silo.name]
        assert ours.data.startswith("keyed:")
        assert ours.spent > 0
    assert not (tmp_path / "server" / "ledger.sqlite").exists()
