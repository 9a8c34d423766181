"""Panels of tables: columns of records beside those of samples, and how far apart pairs of columns are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from fedloom.evaluation.table_marginals import marginal_distances
from fedloom.federation.records import concatenate
from fedloom.modalities.schema import Codes, Numbers, Schema, SchemaColumn
from fedloom.modalities.table import FAMILY, schema_of
from fedloom.reports.charts import bars
from fedloom.reports.figures import Figure, Listing
from fedloom.reports.panel_parts import MOST_GROUPS, Drawn, NotShownError, federation_of, generator_of
from fedloom.reports.subject import Subject
from fedloom.templating import render

SAMPLED = 4000  # rows that are made for each group
CELL = 16  # side of a pair of columns
NAMES = 150  # room for them
OF = ("training rows", "samples")


def columns_beside(subject: Subject) -> Drawn:
    """How frequent each level or bin is among training rows and among samples, and the distances of pairs."""
    generator = generator_of(subject)
    if generator.kind.partition("/")[0] != FAMILY or not generator.pathways:
        raise NotShownError("")
    federation, schema = federation_of(subject), schema_of(generator.kind)
    if federation.is_remote:
        raise NotShownError("the rows stay at their silos")
    training, figures = concatenate([silo.train for silo in federation.silos]), []
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        real = training.of_group(index).x.cpu().numpy()
        made = generator.sample(SAMPLED, group=group).cpu().numpy()
        figures.append(Figure("Columns", chart=_columns(schema, real, made), row=group))
        figures.append(Figure("Distances of pairs of columns", chart=heat_map(schema, real, made), row=group))
    return figures, {}


def _columns(schema: Schema, real: Numbers, made: Numbers) -> Markup:
    """A row for each column: its histograms on one scale, and how far they are apart."""
    distances, codes, rows = marginal_distances(schema, real, made, 1), (schema.codes(real), schema.codes(made)), []
    for number, column in enumerate(schema.columns):
        shares = [_shares(column, each[:, number]) for each in codes]
        most = max(max(each.values()) for each in shares)
        above, below = (bars(f"{column.name}, {of}", each, most) for of, each in zip(OF, shares, strict=True))
        rows.append((column.name, f"{distances[number,]:.3f}", above + below))
    columns = Listing(("column", "distance", f"{OF[0]} above, {OF[1]} below"), rows, right=(1,))
    return render("reports/templates/records.html", {"records": columns})


def _shares(column: SchemaColumn, codes: Codes) -> dict[str, float]:
    """In percent, by what people call a level or a bin."""
    counts = np.bincount(codes, minlength=column.size) / max(1, len(codes))
    return {name: round(100 * float(share), 1) for name, share in zip(_names(column), counts, strict=True)}


def _names(column: SchemaColumn) -> Sequence[str]:
    ends = [column.cell(edge) for edge in column.edges]
    ranges = [f"{low} to {high}" for low, high in pairwise(ends)]
    return [*(column.levels or ranges), *(["no value"] if column.null else [])]


def heat_map(schema: Schema, real: Numbers, made: Numbers) -> Markup:
    """A square for each pair of columns, the darker the further apart the two tables are in it."""
    distances = marginal_distances(schema, real, made, 2)
    darkest = max(distances.values(), default=0) or 1
    squares = [
        (
            NAMES + CELL * first,
            CELL * (second - 1),
            round(distance / darkest, 3),
            f"{schema.names[first]}, {schema.names[second]}: {distance:.3f}",
        )
        for (first, second), distance in distances.items()
    ]
    values = {
        "names": list(schema.names[1:]),
        "squares": squares,
        "cell": CELL,
        "left": NAMES,
        "width": NAMES + CELL * (len(schema.names) - 1),
        "height": CELL * (len(schema.names) - 1),
        "mean": sum(distances.values()) / max(1, len(distances)),
        "most": max(distances.values(), default=0),
    }
    return render("reports/templates/charts/heat.html", values)
