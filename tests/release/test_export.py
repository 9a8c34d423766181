from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest
import torch

import fedloom
from fedloom.engines.base import initial_state
from fedloom.errors import FedloomError, RunFolderError
from fedloom.experiment import Experiment, Run
from fedloom.federation.records import Federation
from fedloom.methods.base import METHODS, SampleInputs
from fedloom.methods.generator import Generator
from fedloom.release import export as exporting
from fedloom.release.export import ExportJob, Graph, export, load_generators, write_graph, write_safetensors
from labelled_vectors import labelled_config, labelled_federation
from support import NARROW, names_in, tiny_config


def fresh(method: str, images: Federation, *overrides: str) -> tuple[Generator, ExportJob]:
    """Generators as they are before the first round, of images or, where the method learns labels, of vectors."""
    vectors = METHODS[method].modalities == ("vector",)
    config = (labelled_config if vectors else _images)(method, "seed=5", *overrides)
    federation = labelled_federation() if vectors else images
    made = Experiment.of(config, federation).method
    server = initial_state(made, federation, config).server
    generator = Generator(made, server, federation.groups, federation.classes)
    return generator, ExportJob(generator, config, federation.shape, lambda _: None)


def _images(method: str, *overrides: str) -> fedloom.Config:
    return tiny_config(f"method.name={method}", *overrides)


REFINED = ("method.flow=[8]", "method.flow_steps=1", "method.refiner=1", "method.refiner_steps=1")
ELSEWHERE = ("linear_head", "marginals")  # which classifies, and learns tables: tests/cli/test_tables.py
CASES = [(name, NARROW.get(name, ())) for name in sorted(METHODS) if name not in ELSEWHERE] + [
    ("fissionvae", ("method.hierarchy=true", "method.prior=wave")),
    ("fissionvae", ("method.prior=random",)),
    ("fedvae", ("model.lipschitz=2.0",)),
    ("flow_vae", REFINED),
]


@pytest.mark.parametrize(("method", "overrides"), CASES, ids=str)
def test_generators_read_back_sample_the_same(
    method: str, overrides: tuple[str, ...], tiny_federation: Federation, tmp_path: Path
) -> None:
    generator, subject = fresh(method, tiny_federation, *overrides)
    assert generator.pathways
    write_safetensors(tmp_path, subject)
    back = load_generators(tmp_path)
    assert back.pathways == generator.pathways
    for pathway in generator.pathways:
        for group in generator.groups:
            ours = generator.sample(5, group=group, pathway=pathway, seed=3)
            assert torch.equal(back.sample(5, group=group, pathway=pathway, seed=3), ours)


@pytest.mark.parametrize(
    ("method", "overrides", "pathway"),
    [
        ("fissionvae", ("method.hierarchy=true", "method.prior=wave"), "roundtrip"),
        ("fedvae", ("model.network=conv", "model.channels=[4,8]", "model.lipschitz=2.0"), "z1"),
        ("dp_cvae", ("method.prior_variance=class",), "x"),
        ("flow", ("method.steps=2",), "flow"),
        ("flow_vae", REFINED, "refined"),
    ],
    ids=str,
)
def test_a_graph_gives_what_pytorch_gives(
    method: str, overrides: tuple[str, ...], pathway: str, tiny_federation: Federation, tmp_path: Path
) -> None:
    generator, _ = fresh(method, tiny_federation, *overrides)
    way, group = generator.method.pathways[pathway], generator.groups[-1]
    write_graph(Graph(generator, group, pathway).eval(), exporting._inputs(generator, pathway, 2), tmp_path / "g.onnx")
    inputs = exporting._inputs(generator, pathway, 7)
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    assert [found.name for found in session.get_inputs()] == [*way.noise, *(["label"] if way.labelled else [])]
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    number = torch.full((7,), generator.groups.index(group))
    noise = {name: inputs[name] for name in way.noise}
    with torch.no_grad():
        truth = way.generate(generator.model(group), SampleInputs(noise, number, inputs.get("label", number)))
    torch.testing.assert_close(torch.from_numpy(found), truth, rtol=0, atol=1e-5)
    assert names_in(tmp_path) == ["g.onnx"]  # weights are inside


def test_an_exported_run_says_what_it_is_and_not_how_it_was_seeded(private: Run, tmp_path: Path) -> None:
    export(private, tmp_path / "out", "safetensors", licence="cc0-1.0")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert 'license: "cc0-1.0"' in card
    assert "| z | z ~ p(z\\|y) -> mean of x | z (3,), label () |" in card
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["run"]["epsilon"] == pytest.approx(5, rel=0.05)
    assert manifest["run"]["config"] == private.config.digest_without_seed()
    facts = json.loads((tmp_path / "out" / "generators.json").read_text(encoding="utf-8"))
    assert facts["config"]["seed"] == 0 != private.config.seed
    for file in (tmp_path / "out").iterdir():
        assert private.config.digest().encode() not in file.read_bytes()
    back = fedloom.load_generators(tmp_path / "out")
    ours = private.sample(4, group="all", label="cat", seed=9)
    assert torch.equal(back.sample(4, group="all", label="cat", seed=9), ours)
    assert torch.equal(back.label_shares, private.generator().label_shares)


def test_graphs_are_compared_before_they_are_handed_on(
    private: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(FedloomError, match="group 'all' and pathway 'z' differs from PyTorch"):
        export(private, tmp_path / "out", "onnx")
    assert names_in(tmp_path) == []


def test_a_run_is_exported_as_one_graph_for_each_group(images: Run, tmp_path: Path) -> None:
    made = export(images, tmp_path / "out", "onnx", accept_risk=True)
    assert made["largest_difference"].keys() == {"mnist/z1.onnx", "fashion-mnist/z1.onnx"}
    assert max(made["largest_difference"].values()) <= 1e-5
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["largest_difference"] == made["largest_difference"]
    assert manifest["files"].keys() == {"README.md", "mnist/z1.onnx", "fashion-mnist/z1.onnx"}


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no exported generators"):
        load_generators(tmp_path)
