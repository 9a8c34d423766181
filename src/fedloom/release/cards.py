"""Cards: what somebody who is handed a data set or a generator should know, and the header Hugging Face reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import fedloom
from fedloom.privacy.ledger import told
from fedloom.release.formats import DATA_FILES
from fedloom.release.provenance import FLAG, Provenance
from fedloom.runs.metrics import split_key

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
    rows = ([group, *(of_group.get(label, 0) for label in classes)] for group, of_group in counts.items())
    stands = (
        f"{records:,} synthetic records of shape {tuple(contents['shape'])}, drawn from generators that learned from "
        f"the records of {_silos(provenance)}. They stand for what these hold together, group by group"
        + (" and class by class." if any(classes) else ". They have no labels: the method generates none.")
    )
    sections = [
        ("What it stands for", f"{stands}\n\n{_origin(provenance, contents)}"),
        ("Records", _table(["group", *(label or "records" for label in classes)], rows)),
        *_sections(provenance),
        (
            "Limits",
            _list(
                [
                    "A generator can learn single records by heart. Unless differential privacy is stated above, "
                    "nothing rules that out.",
                    "What is rare in the records is rarer or missing here; averages are more faithful than details.",
                    "How frequent groups are is not that of the records: all groups have equally many records here.",
                    *_of_labels(contents["labels"]),
                    "Conclusions about people or single cases need the real records.",
                ]
            ),
        ),
        ("Licence", _licence(contents["licence"])),
    ]
    return _page(header, f"{provenance.name}: synthetic data", provenance, sections)


def model_card(provenance: Provenance, contents: Mapping[str, Any], use: str) -> str:
    """The README.md of exported generators; ``contents`` are those of its manifest, ``use`` says how to use them."""
    header = {
        "license": contents["licence"],
        "library_name": "fedloom",
        "tags": _tags(provenance, "generative"),
    }
    ways = contents["pathways"].items()
    inputs = (
        [name, way["summary"], ", ".join(f"{key} {tuple(shape)}" for key, shape in way["inputs"].items())]
        for name, way in ways
    )
    stands = (
        f"Generators of the groups {', '.join(contents['groups'])} that learned from the records of "
        f"{_silos(provenance)}. Inputs are standard normal noise"
        + (", and the number of a class in `label`" if any("label" in way["inputs"] for _, way in ways) else "")
        + f"; the output is a record of shape {tuple(contents['shape'])}"
        + (", pixels in [0, 1]." if len(contents["shape"]) == 3 else ".")
    )
    sections = [
        ("What it stands for", f"{stands}\n\n{_origin(provenance, {})}"),
        ("Pathways", _table(["pathway", "what it does", "inputs of one record"], inputs)),
        ("Use", use),
        *_sections(provenance),
        (
            "Limits",
            _list(
                [
                    "A generator can learn single records by heart. Unless differential privacy is stated above, "
                    "nothing rules that out, and whoever has the generator can look for them at leisure.",
                    "What is rare in the records is rarer or missing in what it generates.",
                ]
            ),
        ),
        ("Licence", _licence(contents["licence"])),
    ]
    return _page(header, f"{provenance.name}: generators", provenance, sections)


def _page(header: Mapping[str, Any], title: str, provenance: Provenance, sections: Iterable[tuple[str, str]]) -> str:
    # JSON is YAML, whatever the names hold.
    front = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items())
    parts = [f"---\n{front}\n---", f"# {_plain(title)}"]
    if provenance.objections:
        reasons = _list(provenance.objections)
        parts.append(f"**Handed on with `{FLAG}`, although something stands against it:**\n\n{reasons}")
    parts += [f"## {heading}\n\n{text}" for heading, text in sections]
    parts.append(f"Made with fedloom {fedloom.__version__}; `manifest.json` has the checksum of every file.")
    return "\n\n".join(parts) + "\n"


def _sections(provenance: Provenance) -> list[tuple[str, str]]:
    """What data sets and generators have in common."""
    privacy = {"guarantee": provenance.guarantee}
    if provenance.epsilon is not None and provenance.delta is not None:
        privacy |= {"epsilon spent": told(provenance.epsilon), "delta": f"{provenance.delta:g}"}
    privacy |= provenance.privacy
    audit = _list(provenance.audit) if provenance.audit else "Not audited."
    return [
        ("Privacy", _list(f"{name}: {text}" for name, text in privacy.items())),
        ("Audit", audit),
        ("Quality", _quality(provenance.metrics)),
    ]


def _origin(provenance: Provenance, contents: Mapping[str, Any]) -> str:
    facts = {
        "run": provenance.name,
        "records of": provenance.source,
        "silos": provenance.silos,
        "rounds": provenance.rounds,
        "method": " ".join([provenance.method, *(f"{key}={value}" for key, value in provenance.options.items())]),
    }
    if contents:
        facts |= {"pathway": contents["pathway"]["summary"], "seed of the samples": contents["seed"]}
    return _list(f"{name}: {value}" for name, value in facts.items())


def _quality(metrics: Mapping[str, float]) -> str:
    """One row a metric, one column a group."""
    if not metrics:
        return "Not measured."
    rows: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        metric, whose = split_key(key)
        rows.setdefault(metric, {})[whose or EVERYBODY] = value
    groups = list(dict.fromkeys(whose for values in rows.values() for whose in values))
    cells = (
        [metric, *(f"{values[group]:.4g}" if group in values else "" for group in groups)]
        for metric, values in rows.items()
    )
    note = "Measured against records, when the run ended or after it; no privacy guarantee covers these numbers."
    return f"{_table(['metric', *groups], cells)}\n\n{note}"


def _of_labels(labels: str | None) -> list[str]:
    """Where the frequencies of classes come from."""
    return {
        None: [],
        "balanced": ["All classes are equally frequent here; among the records they may not be."],
        "prior": ["Classes are as frequent as the run knows them to be: by noisy counts if it took some, else alike."],
    }[labels]


def _licence(licence: str) -> str:
    said = "Not stated: it is for the silos to say what may be done with this." if licence == "unknown" else licence
    return _plain(said)


def _tags(provenance: Provenance, kind: str) -> list[str]:
    private = ["differential-privacy"] if provenance.epsilon is not None else []
    return ["fedloom", "federated-learning", kind, *private]


def _silos(provenance: Provenance) -> str:
    return f"{provenance.silos} silo" + ("" if provenance.silos == 1 else "s")


def _plain(text: object) -> str:
    """On one line, and nothing in it that Markdown would take for a table or a tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _list(items: Iterable[object]) -> str:
    return "\n".join(f"- {_plain(item)}" for item in items)


def _table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [[_plain(cell) for cell in row] for row in (headings, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
