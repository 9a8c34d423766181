"""A third modality, as one file and one preset: everything that is done with records is done with its own."""

from __future__ import annotations

import json
import pickle
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import distributions
from typer.testing import CliRunner

from engines.killing import train_until_write
from fedloom.cli import app, main
from fedloom.config import AuditConfig, Config, load_config
from fedloom.deployment import worker_process
from fedloom.deployment.charter import Charter, load_records
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.errors import ConfigError, DataError
from fedloom.experiment import Experiment, Run, load, resume, train
from fedloom.federation.building import build_federation, federation_from_arrays
from fedloom.federation.canaries import with_canaries
from fedloom.federation.parquet import load_parquet
from fedloom.federation.records import concatenate
from fedloom.modalities.base import MODALITIES, modality_of
from fedloom.registry import allow_only
from fedloom.release.export import export, load_generators
from fedloom.release.synthesis import SynthesisOrder, synthesize
from fedloom.reports.report import write_report
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from fedloom.studio.explorer import Explorer
from local_grid import Deployment
from modalities.toy import FILES, RATES, STEPS, installed, write_counts
from support import assert_same_run, equal_bits


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("installed") / "site"):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counts(tmp_path_factory.mktemp("data") / "counts.npz")


def config_of(data: Path, *overrides: str) -> Config:
    small = ("engine.name=reference", "engine.workers=1", "engine.threads=1", "evaluation.trackers=[]")
    return load_config(str(FILES[1]), [f"data.path={data}", *small, *overrides])


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(config_of(data), tmp_path_factory.mktemp("counts") / "run")


def test_it_takes_one_file_and_one_preset() -> None:
    assert [file.name for file in FILES] == ["counts.py", "counts.toml"]
    assert (set(MODALITIES.own), MODALITIES.origin("counts")) == (
        {"frequencies", "image", "table", "vector"},
        "counts==1.0",
    )
    assert Path(sys.modules[type(MODALITIES["counts"].likelihood("poisson", 0.5)).__module__].__file__ or "").name == (
        "counts.py"
    )


def test_its_likelihood_is_that_of_torch() -> None:
    x = torch.tensor([[0.0, 1.0, 7.0], [3.0, 0.0, 2.0]])
    output = torch.tensor([[-1.0, 0.0, 2.0], [0.5, -3.0, 1.0]])
    expected = -distributions.Poisson(output.exp()).log_prob(x).sum(dim=1)
    torch.testing.assert_close(MODALITIES["counts"].likelihood("poisson", 0.5).negative_log(x, output), expected)


@pytest.mark.parametrize("method", ["fedvae", "fissionvae"])
def test_it_is_learned(data: Path, method: str, tmp_path: Path) -> None:
    overrides = (f"method.name={method}", "rounds=20", "local.epochs=4", "evaluation.metrics=[]")
    made = train(config_of(data, *overrides), tmp_path / "run")
    assert made.folder.status["state"] == "finished"
    means = {group: made.sample(500, group=group, seed=1).mean(dim=0) for group in RATES}
    if method == "fissionvae":  # a decoder for each group
        for group, rates in RATES.items():
            torch.testing.assert_close(means[group], torch.tensor(rates), rtol=0.25, atol=0.5)
    else:
        torch.testing.assert_close(means["ct"], torch.tensor(list(RATES.values())).mean(dim=0), rtol=0.3, atol=0.5)


def test_engines_learn_the_same_and_a_run_goes_on(run: Run, data: Path, tmp_path: Path) -> None:
    fused = train(config_of(data, "engine.name=fused"), tmp_path / "fused")
    for name, tensor in load_checkpoint(run.folder.path).server.items():
        torch.testing.assert_close(load_checkpoint(fused.folder.path).server[name], tensor, rtol=1e-3, atol=1e-4)
    config = config_of(data, "evaluation.metrics=[]")
    train(config, tmp_path / "whole")
    train_until_write(config, tmp_path / "killed", 16)
    assert 0 < RunFolder.open(tmp_path / "killed").rounds_done < 3
    resume(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_it_is_measured_shown_and_reported(run: Run, tmp_path: Path) -> None:
    metrics = run.metrics()[-1]
    for kind in ("spread/pixels/n20/group=ct", "nll/nats/n20/group=mri", "frechet/pixels/n20/group=ct"):
        assert np.isfinite(metrics[kind])
    assert run.evaluate(round_number=3)
    grid = run.folder.path / "samples" / "round-0003" / "ct.png"
    assert Image.open(grid).size == (2 + 8 * (3 * STEPS + 2), 2 + 8 * (16 + 2))  # 64 tiles
    write_report([load(run.folder.path)], tmp_path / "report.html", with_records=True)
    panels = json.loads((tmp_path / "report.json").read_text())["runs"][0]["panels"]
    for name in ("reconstructions", "interpolations", "latent-space", "nearest-neighbours"):
        assert panels[name]["missing"] == ""


def test_what_is_older_than_modalities_is_known_by_its_shape(data: Path, tmp_path: Path) -> None:
    config = config_of(data, "method.name=fedvae", "rounds=1", "model.likelihood=auto", "evaluation.metrics=[]")
    x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    made = train(config, tmp_path / "run", federation_from_arrays({"a": x}))
    sample = made.sample(3, group="all")
    index = tmp_path / "run" / "checkpoints" / "round-0001" / "index.json"
    facts = json.loads(index.read_text())
    assert facts["setting"].pop("modality") == "image"
    index.write_text(json.dumps(facts))
    generator = load(tmp_path / "run").generator()
    assert generator.kind == "image"
    assert torch.equal(generator.sample(3, group="all"), sample)
    charter = Charter.of({"name": "f", "address": "f:1", "silos": {"a": "ct"}, "shape": [1, 4, 4]})
    assert charter.at_the_server().modality is MODALITIES["image"]


def test_what_makes_no_sense_of_it_is_named(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric 'domain' makes no sense of sequences of counts \(allowed: spread, "):
        Experiment.of(config_of(data, "evaluation.metrics=['domain']")).begin("never")
    with pytest.raises(ConfigError, match=r"unknown likelihood 'bernoulli' \(allowed: poisson\)"):
        Experiment.of(config_of(data, "model.likelihood=bernoulli"))
    with pytest.raises(ConfigError, match=r"model.lipschitz bounds nothing with model.likelihood = 'poisson', a mean"):
        Experiment.of(config_of(data, "model.lipschitz=1"))
    with pytest.raises(ConfigError, match=r"'fedgan' needs images, but the records .* are sequences of counts$"):
        Experiment.of(config_of(data, "method.name=fedgan"))


def test_its_releases_hold_whole_numbers(run: Run, tmp_path: Path) -> None:
    for form in ("npz", "parquet"):
        synthesize(run, tmp_path / form, SynthesisOrder(records=40, form=form), accept_risk=True)
    stored = np.load(tmp_path / "npz" / "data.npz")
    seed = Streams(0).torch_seed("synthesize/", silo=0)
    expected = torch.cat([run.sample(20, group=group, seed=seed) for group in RATES]).round().to(torch.int32).numpy()
    assert (stored["x_train"].dtype, str(stored["modality"])) == (np.int32, "counts")
    assert np.array_equal(stored["x_train"], expected)
    (file,) = (tmp_path / "parquet" / "data").glob("*.parquet")
    table = pyarrow.parquet.read_table(file)
    assert table.column_names == [*(f"step {number}" for number in range(1, STEPS + 1)), "group"]
    assert {str(kind) for kind in table.schema.types[:-1]} == {"int32"}
    assert [list(row.values())[:-1] for row in table.to_pylist()] == expected.tolist()
    manifest = json.loads((tmp_path / "parquet" / "manifest.json").read_text())
    assert manifest["columns"] == {f"step {number}": "int32" for number in range(1, STEPS + 1)}
    for source, path in (("npz", tmp_path / "npz" / "data.npz"), ("parquet", file)):
        again = config_of(path, f"data.source={source}", "data.partition=groups", "data.silos=1")
        federation = build_federation(again.data, Streams(0))
        assert (federation.modality, federation.groups) == (MODALITIES["counts"], ("ct", "mri"))
        held = torch.cat([*(silo.train.x for silo in federation.silos), federation.test.x])
        assert sorted(held.tolist()) == sorted(expected.tolist())
    with pytest.raises(ConfigError, match="folder holds images of 1 or 3 channels, and these sequences of counts have"):
        synthesize(run, tmp_path / "folder", SynthesisOrder(records=4, form="folder"), accept_risk=True)


DAYS = ("mon", "tue", "wed", "thu", "fri")
WEEKS = f"counts/{','.join(DAYS)}"


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on records with a schema, which nobody wrote to a file."""
    drawn = np.random.default_rng(1)
    silos = {f"{group}-0": drawn.poisson(rates, (40, STEPS)) for group, rates in RATES.items()}
    groups = {f"{group}-0": group for group in RATES}
    federation = federation_from_arrays(silos, groups, modality=WEEKS)
    config = config_of(Path("none"), "rounds=1", "evaluation.metrics=[]")
    return train(config, tmp_path_factory.mktemp("weeks") / "run", federation)


def test_its_schema_travels_in_its_name(weeks: Run, tmp_path: Path) -> None:
    generator = load(weeks.folder.path).generator()
    modality = modality_of(generator.kind, (STEPS,))
    assert (generator.kind, modality.family, modality_of(WEEKS, ()) is modality) == (WEEKS, "counts", True)
    assert pickle.loads(pickle.dumps(modality)) is modality
    assert modality.schema((STEPS,)) == {
        "modality": WEEKS,
        "shape": [STEPS],
        "values": "expected counts",
        "columns": dict.fromkeys(DAYS, "int32"),
    }
    synthesize(weeks, tmp_path / "out", SynthesisOrder(records=8, form="parquet"), accept_risk=True)
    (file,) = (tmp_path / "out" / "data").glob("*.parquet")
    assert pyarrow.parquet.read_table(file).column_names == [*DAYS, "group"]
    assert load_parquet(str(file)).train.modality is modality
    charter = Charter.of({"name": "f", "address": "f:1", "silos": {"a": "ct"}, "shape": [STEPS], "modality": WEEKS})
    assert Charter.of(charter.to_mapping()).at_the_server().modality is modality
    with pytest.raises(
        DataError, match=r"^sequences of counts \(mon,.*\) and sequences of counts do not go into one table$"
    ):
        concatenate([replace(charter.at_the_server().test, kind=kind) for kind in (WEEKS, "counts")])


def test_records_of_columns_are_shown_as_tables(weeks: Run, tmp_path: Path) -> None:
    sample = weeks.sample(64, group="ct", seed=weeks.config.seed).round().int().tolist()
    rows = (weeks.folder.path / "samples" / "round-0001" / "ct.csv").read_text().splitlines()
    assert rows == [",".join(DAYS), *(",".join(map(str, row)) for row in sample)]
    write_report([load(weeks.folder.path)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    few = weeks.sample(16, group="ct").round().int().tolist()
    cells = '</td><td class="n">'
    assert all(f'<tr><td class="n">{cells.join(map(str, row))}</td></tr>' in page for row in few)
    told = CliRunner().invoke(app, ["sample", str(weeks.folder.path), "--group", "ct", "--out", f"{tmp_path}/a.png"])
    assert told.stdout == f"{tmp_path}/a.csv: 64 records of ct\nprivacy: no DP guarantee\n"
    with pytest.raises(
        ConfigError, match=r"sequences of counts .* of shape .* have no pictures, so there is nothing to"
    ):
        Explorer(weeks.generator(), 1)


def test_a_schema_that_does_not_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"^2 steps have a name, but sequences have 5$"):
        modality_of("counts/mon,tue", (STEPS,)).schema((STEPS,))
    with pytest.raises(ConfigError, match=r"^modality 'image' takes no schema, but 'image/rgb' gives it one$"):
        modality_of("image/rgb", (3, 4, 4))


def test_trials_and_canaries_are_counts(data: Path) -> None:
    config = config_of(data, "privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1", "local.batch_size=4")
    tried = Experiment.of(config).trainer.made_up(0).x
    assert torch.equal(tried, tried.floor())
    assert set(tried.flatten().tolist()) <= set(range(10))
    assert tried.max() > 1
    plain = build_federation(config.data, Streams(0))
    planted = with_canaries(plain, AuditConfig(canaries=200, silos=("ct-0",)), Streams(0))
    highest = plain.silos[0].train.x.amax(dim=0)
    assert len(set(highest.tolist())) > 1
    for step in range(STEPS):
        assert set(planted.canaries[0].records.x[:, step].tolist()) == {0, highest[step].item()}


def test_its_generators_read_back_sample_the_same(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "safetensors", accept_risk=True)
    assert torch.equal(load_generators(tmp_path / "out").sample(5, group="ct"), run.sample(5, group="ct"))
    assert "expected counts" in (tmp_path / "out" / "README.md").read_text()


def test_silos_at_home_learn_what_the_simulation_learns(run: Run, data: Path, tmp_path: Path) -> None:
    config = config_of(data)
    Deployment(tmp_path, config, build_federation(config.data, Streams(config.seed))).run()
    assert equal_bits(load_checkpoint(tmp_path / "server").server, load_checkpoint(run.folder.path).server)


def test_a_silo_of_another_modality_is_refused(data: Path, tmp_path: Path) -> None:
    charter = Charter(name="f", address="f:1", silos={"a": "ct", "b": "mri"}, shape=(STEPS,), modality="counts")
    assert charter.at_a_silo("a", load_records(data)).modality is MODALITIES["counts"]
    np.savez(tmp_path / "own.npz", x_train=np.ones((4, STEPS)))
    with pytest.raises(DataError, match=r"^'own' holds vectors, the charter says sequences of counts$"):
        charter.at_a_silo("b", load_records(tmp_path / "own.npz"))


def test_a_silo_that_brings_another_modality_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    charter = Charter(name="f", address="f:1", silos={"a": "ct", "b": "mri"}, shape=(STEPS,), modality="counts")
    home = SiloDirectory.create(tmp_path / "b", Invitation("b", charter, "a certificate"))
    (home.path / "policy.toml").write_text('plugins = ["counts==1.0"]\n')
    np.savez(tmp_path / "own.npz", x_train=np.ones((4, STEPS)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        with pytest.raises(SystemExit) as ended:
            worker_process.main(str(home.path), str(tmp_path / "own.npz"), str(tmp_path / "socket"))
    finally:
        allow_only(None)
        torch.set_flush_denormal(False)
    assert ended.value.code == 2
    assert [record.getMessage() for record in caplog.records] == [
        "'own' holds vectors, the charter says sequences of counts"
    ]


@pytest.mark.parametrize(
    ("modality", "complaint"),
    [
        ("os:path", "unknown modality 'os:path' (allowed: counts, frequencies, image, table, vector)"),
        ("counts", "x_train of own.npz is float64 of shape (4, 5); give whole numbers of shape (n, steps)"),
    ],
    ids=["an import path", "fractions"],
)
def test_a_file_that_is_not_what_it_says_ends_the_command(
    modality: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", x_train=np.ones((4, STEPS)), modality=modality)
    monkeypatch.setattr(sys, "argv", ["fedloom", "run", "demo", "data.source=npz", "data.path=own.npz"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
