"""``fedloom sample``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.output import Json, Round, RunDir, plural, privacy_of, say, say_guarantee, show_json
from fedloom.errors import ConfigError, FedloomWarning

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.methods.generator import Generator

ARRAYS = ".npz"
FORMS = (".png", ".csv", ARRAYS)


def sample(
    folder: RunDir,
    group: Annotated[str, typer.Option(help="Whose images to generate.", show_default=False)],
    n: Annotated[int, typer.Option(help="How many images; of each class that is asked for.")] = 64,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="A class by name or number, or several with commas between them; may be repeated.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The file to write: a grid of pictures as .png, a table as .csv, or arrays as .npz.")
    ] = Path("grid.png"),
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same images.")] = 0,
    pathway: Annotated[str, typer.Option(help="A way to generate; the method's first unless told.")] = "",
    prior_of: Annotated[str, typer.Option(help="Draw latents from the prior of this group instead.")] = "",
    round_number: Round = None,
    as_json: Json = False,
) -> None:
    """Generate images of a group, of the classes asked for, and write them: as one grid, a row for each class."""
    if out.suffix.lower() not in FORMS:
        raise ConfigError(
            f"--out = '{out}' must end in .png, in .csv for records that are rows of a table, or in .npz for arrays"
        )
    import torch

    from fedloom.experiment import load
    from fedloom.runs.images import save_shown

    run = load(folder)
    if problem := run.folder.not_for_release:
        warnings.warn(f"{folder} is {problem}", FedloomWarning, stacklevel=1)
    generator = run.generator(round_number)
    labels = generator.classes_of(label or ())
    tables = [
        generator.sample(n, group=group, seed=seed, pathway=pathway, prior_of=prior_of, label=each)
        for each in labels or ("",)
    ]
    for each in labels:
        if not generator.label_shares_of(group)[generator.classes.index(each)]:
            warnings.warn(f"group '{group}' learned from no record of class '{each}'", FedloomWarning, stacklevel=1)
    if out.suffix.lower() == ARRAYS:
        _save_arrays(out, generator, group, labels, tables)
    else:
        columns = n if len(labels) > 1 else 0
        out = save_shown(torch.cat(tables), out.with_suffix(""), columns, kind=generator.kind)
    if as_json:
        show_json(
            {
                "out": str(out),
                "group": group,
                "n": n,
                "labels": list(labels),
                "seed": seed,
                "pathway": pathway or next(iter(generator.method.pathways)),
                "prior_of": prior_of or group,
                "round": run.folder.rounds_done if round_number is None else round_number,
                "privacy": privacy_of(run.folder),
            }
        )
    else:
        what = plural(sum(map(len, tables)), "image" if out.suffix == ".png" else "record")
        say(f"{out}: {what} of {group}" + (f", {n} of each class of {', '.join(labels)}" if labels else ""))
        say_guarantee(run.folder)


def _save_arrays(out: Path, generator: Generator, group: str, labels: Sequence[str], tables: Sequence[Tensor]) -> None:
    """As ``data.source = "npz"`` reads them."""
    from fedloom.release.formats import NpzWriter, RecordKind

    kind = RecordKind(tuple(tables[0].shape[1:]), (group,), tuple(labels), generator.kind)
    writer = NpzWriter(out.parent, kind, out.name)
    for x, label in zip(tables, labels or ("",), strict=True):
        writer.add(x, group, label)
    writer.close()
