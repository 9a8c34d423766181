"""Cards: what somebody who is handed a data set or a generator should know, and the header Hugging Face reads.

Their sentences lie in templates; a name from a run is never taken for a table or a tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

import fedloom
from fedloom.evaluation.metric import metric_title
from fedloom.modalities.base import modality_of
from fedloom.privacy.ledger import format_epsilon
from fedloom.release.formats import DATA_FILES
from fedloom.release.provenance import FLAG, Provenance
from fedloom.runs.metrics import split_key
from fedloom.templating import render

SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
LARGER = "n>10M"
EVERYBODY = "all"


def dataset_card(provenance: Provenance, contents: Mapping[str, Any]) -> str:
    """The README.md of a synthetic data set; ``contents`` are those of its manifest."""
    records, counts = contents["records"], contents["counts"]
    header = {
        "license": contents["licence"],
        "pretty_name": f"{provenance.name} (synthetic)",
        "tags": _tags(provenance, "synthetic"),
        "size_categories": [next((name for bound, name in SIZES.items() if records < bound), LARGER)],
    }
    if contents["format"] in DATA_FILES:
        files = [{"split": "train", "path": DATA_FILES[contents["format"]]}]
        header["configs"] = [{"config_name": "default", "data_files": files}]
    classes = list(dict.fromkeys(label for of_group in counts.values() for label in of_group))
    values = {
        "records": records,
        "classes": classes,
        "headers": ["group", *(label or "records" for label in classes)],
        "counts": [[group, *(of_group.get(label, 0) for label in classes)] for group, of_group in counts.items()],
        "labels": contents["labels"],
        "rules": contents.get("rules", ()),
    }
    origin = {"pathway": contents["pathway"]["summary"], "seed of the samples": contents["seed"]}
    return _card("dataset", header, provenance, contents, values | {"origin": _origin(provenance) | origin})


def model_card(provenance: Provenance, contents: Mapping[str, Any], use: str) -> str:
    """The README.md of exported generators; ``contents`` are those of its manifest, ``use`` says how to use them."""
    header = {
        "license": contents["licence"],
        "library_name": "fedloom",
        "tags": _tags(provenance, "generative"),
    }
    ways = contents["pathways"]
    values = {
        "meaning": modality_of(contents["modality"], tuple(contents["shape"])).values,
        "groups_named": ", ".join(contents["groups"]),
        "labelled": any("label" in way["inputs"] for way in ways.values()),
        "pathways": [
            [name, way["summary"], ", ".join(f"{key} {tuple(shape)}" for key, shape in way["inputs"].items())]
            for name, way in ways.items()
        ],
        "use": Markup(use),
        "origin": _origin(provenance),
    }
    return _card("model", header, provenance, contents, values)


def _card(
    name: str,
    header: Mapping[str, Any],
    provenance: Provenance,
    contents: Mapping[str, Any],
    values: Mapping[str, object],
) -> str:
    groups, quality = _quality(provenance.metrics)
    shared = {
        # JSON is YAML, whatever the names hold.
        "header": {key: Markup(json.dumps(value, ensure_ascii=False)) for key, value in header.items()},
        "run": provenance,
        "flag": FLAG,
        "silos": f"{provenance.silos} silo" + ("" if provenance.silos == 1 else "s"),
        "shape": tuple(contents["shape"]),
        "privacy": _privacy(provenance),
        "groups": groups,
        "quality": quality,
        "licence": contents["licence"],
        "version": fedloom.__version__,
    }
    return f"{render(f'release/templates/{name}.md', {**shared, **values})}\n"


def _privacy(provenance: Provenance) -> dict[str, str]:
    spent = {}
    if provenance.epsilon is not None and provenance.delta is not None:
        spent = {"epsilon spent": format_epsilon(provenance.epsilon), "delta": f"{provenance.delta:g}"}
    return {"guarantee": provenance.guarantee, **spent, **provenance.privacy}


def _origin(provenance: Provenance) -> dict[str, object]:
    return {
        "run": provenance.name,
        "records of": provenance.source,
        "silos": provenance.silos,
        "rounds": provenance.rounds,
        "method": " ".join([provenance.method, *(f"{key}={value}" for key, value in provenance.options.items())]),
    }


def _quality(metrics: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """One row a metric, one column a group."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        metric, whose = split_key(key)
        rows.setdefault(metric, {})[whose or EVERYBODY] = value
    groups = list(dict.fromkeys(whose for values in rows.values() for whose in values))
    cells = (
        [metric_title(metric), *(f"{values[group]:.4g}" if group in values else "" for group in groups), metric]
        for metric, values in rows.items()
    )
    return ["metric", *groups, "key"], list(cells)


def _tags(provenance: Provenance, kind: str) -> list[str]:
    private = ["differential-privacy"] if provenance.epsilon is not None else []
    return ["fedloom", "federated-learning", kind, *private]
