"""Small tables of visits: every kind of column, missing values, several rows a subject, and rules that they keep to."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path

import numpy as np

from fedloom.federation.tables import read_schema
from fedloom.modalities.schema import Schema

NAMES = ("subject", "ward", "admitted", "discharged", "age", "weight", "pain", "sex", "pregnant", "note")
SCHEMA = """\
target = "pain"
subject = "subject"
ignored = ["note"]
rules = ["admitted <= discharged", "if sex is male then pregnant is null"]

[columns.ward]
kind = "categorical"
levels = ["north", "south", "other"]
other = "other"

[columns.admitted]
kind = "date"
first = "2020-01-01"
last = "2020-12-31"
bins = 4

[columns.discharged]
kind = "date"
first = "2020-01-01"
last = "2021-12-31"
bins = 4
null = true

[columns.age]
kind = "integer"
bounds = [0, 99]
bins = 5

[columns.weight]
kind = "continuous"
bounds = [0.5, 200]
bins = 4
null = true

[columns.pain]
kind = "ordinal"
levels = ["none", "some", "much"]

[columns.sex]
kind = "categorical"
levels = ["female", "male"]

[columns.pregnant]
kind = "categorical"
levels = ["no", "yes"]
null = true
"""


def schema_file(folder: Path, text: str = SCHEMA) -> Path:
    """The schema in its file."""
    file = folder / "schema.toml"
    file.write_text(text, encoding="utf-8")
    return file


def schema(folder: Path, text: str = SCHEMA) -> Schema:
    """The schema, read from its file."""
    return read_schema(schema_file(folder, text))


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Cells by column; two rows of each subject, one after the other."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        admitted = datetime.date(2020, 1, 1) + datetime.timedelta(int(draw.integers(0, 366)))
        discharged = admitted + datetime.timedelta(int(draw.integers(0, 200)))
        sex = str(draw.choice(["female", "male"]))
        found.append(
            {
                "subject": f"s{number // 2}",
                "ward": str(draw.choice(["north", "south", "attic"])),
                "admitted": str(admitted),
                "discharged": "" if draw.random() < 0.2 else str(discharged),
                "age": str(draw.integers(0, 100)),
                "weight": "" if draw.random() < 0.1 else f"{draw.uniform(0.5, 200):.3f}",
                "pain": str(draw.choice(["none", "some", "much"], p=[0.7, 0.2, 0.1])),
                "sex": sex,
                "pregnant": "" if sex == "male" else str(draw.choice(["no", "yes"])),
                "note": f"free text {number}, nobody's business",
            }
        )
    return found


def write_rows(file: Path, found: list[dict[str, str]]) -> Path:
    """As a CSV file."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, NAMES)
        writer.writeheader()
        writer.writerows(found)
    return file
