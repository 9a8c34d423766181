"""``fedloom sample``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
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
Labels = Annotated[
    list[str] | None,
    typer.Option(
        help="A class by name or number, or several with commas between them; may be repeated.", show_default=False
    ),
]
Out = Annotated[
    Path, typer.Option(help="The file to write: a grid of pictures as .png, a table as .csv, or arrays as .npz.")
]


def sample(
    folder: RunDir,
    group: Annotated[str, typer.Option(help="Whose images to generate.", show_default=False)],
    n: Annotated[int, typer.Option(help="How many images; of each class that is asked for.")] = 64,
    label: Labels = None,
    out: Out = Path("grid.png"),
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
    from fedloom.experiment import load

    run = load(folder)
    if problem := run.folder.not_for_release:
        warnings.warn(f"{folder} is {problem}", FedloomWarning, stacklevel=1)
    generator = run.generator(round_number)
    labels = generator.classes_of(label or ())
    tables = {
        each: generator.sample(n, group=group, seed=seed, pathway=pathway, prior_of=prior_of, label=each)
        for each in labels or ("",)
    }
    _warn_of_unmet(generator, group, labels)
    out = _save(out, generator, group, tables)
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
        what = plural(n * len(tables), "image" if out.suffix == ".png" else "record")
        say(f"{out}: {what} of {group}" + (f", {n} of each class of {', '.join(labels)}" if labels else ""))
        say_guarantee(run.folder)


def _warn_of_unmet(generator: Generator, group: str, labels: Iterable[str]) -> None:
    for label in labels:
        if not generator.label_shares_of(group)[generator.classes.index(label)]:
            warnings.warn(f"group '{group}' learned from no record of class '{label}'", FedloomWarning, stacklevel=2)


def _save(out: Path, generator: Generator, group: str, tables: Mapping[str, Tensor]) -> Path:
    """A grid or a table; or arrays, as ``data.source = "npz"`` reads them. The name of what was written."""
    import torch

    from fedloom.release.formats import NpzWriter, RecordKind
    from fedloom.runs.images import save_shown

    if out.suffix.lower() != ARRAYS:
        x = torch.cat([*tables.values()])
        return save_shown(x, out.with_suffix(""), len(x) // len(tables) if len(tables) > 1 else 0, kind=generator.kind)
    shape = tuple(next(iter(tables.values())).shape[1:])
    writer = NpzWriter(out.parent, RecordKind(shape, (group,), tuple(filter(None, tables)), generator.kind), out.name)
    for label, x in tables.items():
        writer.add(x, group, label)
    writer.close()
    return out
