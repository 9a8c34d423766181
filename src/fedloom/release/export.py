"""Generators for others: as safetensors that fedloom reads back, or as ONNX graphs from noise to records."""

from __future__ import annotations

import importlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.config import AuditConfig, Config, DataConfig, EngineConfig, EvaluationConfig, PrivacyConfig
from fedloom.errors import ConfigError, FedloomError, MissingExtraError, RunFolderError, unknown
from fedloom.federation.rounds import Site
from fedloom.methods.base import Pathway, SampleInputs, Setting, make_method
from fedloom.methods.generator import LABEL_SHARES, Generator
from fedloom.methods.steps import ServerState
from fedloom.modalities.base import modality_of
from fedloom.outline import in_outline
from fedloom.privacy.lipschitz import Bounded
from fedloom.release.cards import model_card
from fedloom.release.provenance import Limits, ReleasedRun, check_risk, pathway_of, provenance_of
from fedloom.release.release_folder import check_place, file_names, release_folder
from fedloom.settings import parse
from fedloom.sharing.codec import BLOCKS, MEMORY, flat, packed, parts, under
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.streams import Streams

WEIGHTS, DESCRIPTION = "generators.safetensors", "generators.json"
TOLERANCE = 1e-5  # between ONNX and PyTorch
CHECKED = 64  # records that they are compared on
SCHEMA = 1
LABEL, OUTPUT = "label", "records"  # the input that says which class; what comes out
BUFFERS = "buffers/"
QUIET = ("torch.onnx", "onnxscript", "onnx_ir")  # loggers that tell of what is not installed and of every pass


@dataclass(frozen=True)
class ExportJob:
    """The generator that is exported, and what a user must know to call it."""

    generator: Generator
    config: Config
    shape: tuple[int, ...]  # of a record
    progress: Callable[[str], None]


@dataclass(frozen=True)
class Format:
    """How it is written, and how others use it, in Markdown; ``{first}`` is the first group's name."""

    write: Callable[[Path, ExportJob], dict[str, Any]]  # returns what the manifest says of it
    use: str


def export(
    run: ReleasedRun,
    out: Path,
    form: str,
    *,
    licence: str = "unknown",
    limits: Sequence[Limits] = (),
    accept_risk: bool = False,
    to_hub: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write a run's generators into a new folder and return what it holds; ``progress`` hears of each file.

    ``limits`` are those of the silos whose data the run learned from; what something stands against needs
    ``accept_risk``.
    """
    if form not in FORMATS:
        raise ConfigError("--format: " + unknown("format", form, FORMATS))
    check_place(out)
    provenance = provenance_of(run.folder, limits)
    generator = run.generator()
    first = pathway_of(generator)
    check_risk(provenance, run.folder, accept_risk)
    shape = tuple(generator.sample(1, group=generator.groups[0], pathway=first).shape[1:])
    contents = {
        "kind": "generators",
        "format": form,
        "groups": list(generator.groups),
        "classes": list(generator.classes),
        **modality_of(generator.kind, shape).schema(shape),
        "pathways": {name: _described(generator.method.pathways[name]) for name in generator.pathways},
        "licence": licence,
    }
    card = model_card(provenance, contents, FORMATS[form].use.replace("{first}", json.dumps(generator.groups[0])))
    with release_folder(out, provenance, contents, card, to_hub=to_hub) as folder:
        subject = ExportJob(generator, run.folder.config, shape, progress or (lambda _: None))
        contents |= FORMATS[form].write(folder, subject)  # before the manifest is written
    return contents


def _described(way: Pathway) -> dict[str, Any]:
    inputs: dict[str, list[int]] = {name: list(shape) for name, shape in way.noise.items()}
    return {"summary": way.summary, "inputs": inputs | ({LABEL: []} if way.labelled else {})}


# safetensors


@dataclass(frozen=True)
class ExportedGenerators(Generator):
    """Generators from a file; what depends on the seed of their run is in ``buffers``, by group."""

    __repr__ = in_outline

    buffers: Mapping[str, Tensors] = field(default_factory=dict)

    def model(self, group: str) -> nn.Module:
        """The model of a group, with its buffers."""
        model = super().model(group)
        for name, buffer in _unsaved_buffers(model).items():
            buffer.copy_(self.buffers[group][name])
        return model


def _unsaved_buffers(model: nn.Module) -> Tensors:
    """What a model computes from the configuration, such as prior means."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def write_safetensors(folder: Path, subject: ExportJob) -> dict[str, Any]:
    """The blocks that generate, and what it takes to build their networks; not the run's seed, nor where data lie."""
    subject.progress(WEIGHTS)
    generator = subject.generator
    keys = {
        key
        for number in range(len(generator.groups))
        for name in generator.pathways
        for block in generator.method.pathways[name].blocks
        for key in generator.method.generating.prefixes(block, Site("server", (number,))).values()
    }
    blocks = generator.server.sampled
    tensors = flat(BLOCKS, {key: blocks[key] for key in sorted(keys)})
    tensors |= flat(BUFFERS, {group: _unsaved_buffers(generator.model(group)) for group in generator.groups})
    if LABEL_SHARES in generator.server.memory:
        tensors[f"{MEMORY}{LABEL_SHARES}"] = generator.server.memory[LABEL_SHARES]
    (folder / WEIGHTS).write_bytes(packed(tensors))
    public = replace(
        subject.config,
        seed=0,  # whoever knows the seed of a simulation can take its noise away
        data=DataConfig(),
        privacy=PrivacyConfig(),
        evaluation=EvaluationConfig(),
        audit=AuditConfig(),
        engine=EngineConfig(),
    )
    facts = {
        "schema": SCHEMA,
        "config": public.to_mapping(),
        "modality": generator.kind,
        "shape": list(subject.shape),
        "groups": list(generator.groups),
        "classes": list(generator.classes),
    }
    (folder / DESCRIPTION).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    return {}


def load_generators(path: Path | str) -> Generator:
    """Generators that ``fedloom export --format safetensors`` wrote; they sample as those of the run did."""
    folder = Path(path)
    try:
        facts = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if facts["schema"] != SCHEMA:
            raise RunFolderError(f"{folder} has export schema {facts['schema']}; this version reads {SCHEMA}")
        config = parse(Config, facts["config"])
        shape, groups, classes = (tuple(facts[name]) for name in ("shape", "groups", "classes"))
        modality = str(facts.get("modality", ""))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunFolderError(f"{folder} holds no exported generators that can be read ({error})") from error
    blocks, memory = parts(BLOCKS, tensors, BlockKey.of), under(MEMORY, tensors)
    kept = parts(BUFFERS, tensors, str)
    buffers = {group: kept.get(group, {}) for group in groups}
    method = make_method(Setting(config, shape, groups, classes, kind=modality))
    return ExportedGenerators(method, ServerState(blocks, memory), groups, classes, modality, buffers)


# ONNX


class Settled(nn.Module):
    """A bounded layer whose weight no longer changes: the bound need not be computed again."""

    weight: Tensor

    def __init__(self, layer: Bounded) -> None:
        super().__init__()
        self.register_buffer("weight", layer.bounded().detach())
        self.bias, self.apply_to = layer.bias, layer.apply_to

    def forward(self, x: Tensor) -> Tensor:
        """The layer on a batch, with its weight as the bound leaves it."""
        return self.apply_to(x, self.weight, self.bias)


class Graph(nn.Module):
    """A group's pathway as a function of its inputs alone: noise, in the pathway's order, then the label if told."""

    def __init__(self, generator: Generator, group: str, pathway: str) -> None:
        super().__init__()
        self.model = generator.model(group)
        self.way, self.number = generator.method.pathways[pathway], generator.groups.index(group)
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Bounded):
                    setattr(parent, name, Settled(child))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The records that some noise becomes."""
        noise = dict(zip(self.way.noise, inputs, strict=False))
        group = torch.full((inputs[0].shape[0],), self.number)
        condition = inputs[-1] if self.way.labelled else group
        return self.way.generate(self.model, SampleInputs(noise, group, condition))


def write_onnx(folder: Path, subject: ExportJob) -> dict[str, Any]:
    """``<group>/<pathway>.onnx`` for each, compared with PyTorch before it is handed on."""
    runtime, generator = _packages(), subject.generator
    if generator.kind and (modality := modality_of(generator.kind, subject.shape)).types:
        raise ConfigError(f"--format onnx holds numbers alone, and {modality.plural} are more; use safetensors")
    places, differences = file_names(generator.groups), {}
    for group in generator.groups:
        (folder / places[group]).mkdir()
        for pathway in generator.pathways:
            file = folder / places[group] / f"{pathway}.onnx"
            subject.progress(f"{places[group]}/{file.name}")
            graph = Graph(generator, group, pathway).eval()
            write_graph(graph, _inputs(generator, pathway, 2), file)
            inputs = _inputs(generator, pathway, CHECKED)
            with torch.no_grad():
                truth = graph(*inputs.values())
            session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
            (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
            difference = float((torch.from_numpy(found) - truth).abs().max())
            if not difference <= TOLERANCE:
                raise FedloomError(
                    f"the ONNX graph of group '{group}' and pathway '{pathway}' differs from PyTorch by "
                    f"{difference:.2g}, more than {TOLERANCE:g}: it is not handed on"
                )
            differences[f"{places[group]}/{file.name}"] = difference
    return {"largest_difference": differences}


def _inputs(generator: Generator, pathway: str, rows: int) -> dict[str, Tensor]:
    """Noise, and every class in turn."""
    way, streams = generator.method.pathways[pathway], Streams(0)
    inputs = {
        name: streams.normal(f"export/{name}", rows, math.prod(shape)).reshape(rows, *shape)
        for name, shape in way.noise.items()
    }
    return inputs | ({LABEL: torch.arange(rows) % len(generator.classes)} if way.labelled else {})


def write_graph(graph: nn.Module, inputs: Mapping[str, Tensor], file: Path) -> None:
    """One ONNX file with its weights inside, for any number of records."""
    rows = torch.export.Dim("count")
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            tuple(inputs.values()),
            dynamo=True,
            dynamic_shapes=(tuple({0: rows} for _ in inputs),),
            input_names=list(inputs),
            output_names=[OUTPUT],
            verbose=False,
        )
    assert program is not None
    program.save(file, external_data=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter speaks of packages that it misses, which is no concern of the person who waits."""
    loggers = [logging.getLogger(name) for name in QUIET]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _packages() -> ModuleType:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"--format onnx needs the package '{name}'; install it with: pip install 'fedloom[release]'"
            ) from error
    return module


FORMATS: dict[str, Format] = {
    "safetensors": Format(
        write_safetensors,
        """```python
import fedloom

generators = fedloom.load_generators(".")  # the folder of this file
records = generators.sample(16, group={first}, seed=1)
```""",
    ),
    "onnx": Format(
        write_onnx,
        "One file for each group and pathway, `<group>/<pathway>.onnx`; the table above names its inputs, for any "
        "number of records. The output is `records`; `manifest.json` has its largest difference from PyTorch's.",
    ),
}
