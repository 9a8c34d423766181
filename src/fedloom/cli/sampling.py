"""``fedloom sample``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, Round, RunDir, plural, privacy_of, say, say_guarantee, show_json
from fedloom.errors import ConfigError, FedloomWarning


def sample(
    folder: RunDir,
    group: Annotated[str, typer.Option(help="Whose images to generate.", show_default=False)],
    n: Annotated[int, typer.Option(help="How many images.")] = 64,
    out: Annotated[
        Path, typer.Option(help="The file to write: a grid of pictures as .png, or a table as .csv.")
    ] = Path("grid.png"),
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same images.")] = 0,
    pathway: Annotated[str, typer.Option(help="A way to generate; the method's first unless told.")] = "",
    prior_of: Annotated[str, typer.Option(help="Draw latents from the prior of this group instead.")] = "",
    round_number: Round = None,
    as_json: Json = False,
) -> None:
    """Generate images of a group and write them as one grid."""
    if out.suffix.lower() not in (".png", ".csv"):
        raise ConfigError(f"--out = '{out}' must end in .png, or in .csv for records that are rows of a table")
    from fedloom.experiment import load
    from fedloom.runs.images import save_shown

    run = load(folder)
    if problem := run.folder.not_for_release:
        warnings.warn(f"{folder} is {problem}", FedloomWarning, stacklevel=1)
    generator = run.generator(round_number)
    made = generator.sample(n, group=group, seed=seed, pathway=pathway, prior_of=prior_of)
    out = save_shown(made, out.with_suffix(""), kind=generator.kind)
    if as_json:
        show_json(
            {
                "out": str(out),
                "group": group,
                "n": n,
                "seed": seed,
                "pathway": pathway or next(iter(generator.method.pathways)),
                "prior_of": prior_of or group,
                "round": run.folder.rounds_done if round_number is None else round_number,
                "privacy": privacy_of(run.folder),
            }
        )
    else:
        say(f"{out}: {plural(n, 'image' if out.suffix == '.png' else 'record')} of {group}")
        say_guarantee(run.folder)
