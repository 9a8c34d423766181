"""``fedloom data``: obtain data sets, and look at who holds what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedloom.cli.output import Json, Overrides, plural, say, show, show_json, table, terminal
from fedloom.config import Config, load_config, override, parse, preset_names
from fedloom.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.federation.records import Federation

app = typer.Typer(no_args_is_help=True, help="Obtain data sets, and see who holds what.")

LEVELS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 16


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="mnist or fashion-mnist.", show_default=False)],
    source: Annotated[
        Path | None, typer.Option("--from", help="A folder that holds the files; nothing is downloaded.")
    ] = None,
    destination: Annotated[
        Path | None,
        typer.Option("--to", help="Where to put them; the cache unless told.", show_default=False),
    ] = None,
) -> None:
    """Obtain a full data set, verified file by file; a download that was cut goes on."""
    from fedloom.federation import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = terminal()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        folder = download.get(
            name, source, destination, lambda done, total: progress.update(task, completed=done, total=total or None)
        )
    say(f"{name} is complete and verified in {folder}")


@app.command("show")
def show_federation(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A data set, a preset, or a FILE.toml.", show_default=False)
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show the silos that a data set or preset makes: their records, groups and labels."""
    from fedloom.federation.building import build_federation
    from fedloom.streams import Streams

    config = _config(name, overrides or [])
    federation = build_federation(config.data, Streams(config.seed))
    if as_json:
        show_json(_described(federation))
    else:
        _print(federation)


def _config(name: str, overrides: list[str]) -> Config:
    from fedloom.federation.sources import SOURCES

    if name in SOURCES:
        return parse(Config, override({"data": {"source": name}}, overrides))
    if name not in preset_names() and not name.endswith(".toml"):
        raise ConfigError(unknown("data set or preset", name, [*SOURCES, *preset_names()]))
    return load_config(name, overrides)


def _counts(column: Tensor, names: tuple[str, ...]) -> dict[str, int]:
    """How often each name occurs; records without a label are counted nowhere."""
    found = column[column >= 0].bincount(minlength=len(names)).tolist()
    return dict(zip(names, found, strict=True))


def _described(federation: Federation) -> dict[str, Any]:
    silos = [
        {
            "silo": silo.name,
            "records": len(silo),
            "groups": _counts(silo.train.group, federation.groups),
            "classes": _counts(silo.train.y, federation.classes),
        }
        for silo in federation.silos
    ]
    return {
        "name": federation.name,
        "shape": list(federation.shape),
        "groups": list(federation.groups),
        "classes": list(federation.classes),
        "held_out": len(federation.test),
        "silos": silos,
    }


def _print(federation: Federation) -> None:
    described = _described(federation)
    shape = " x ".join(map(str, described["shape"]))
    say(f"{described['name']}: {plural(len(federation), 'silo')}, {plural(described['held_out'], 'held-out record')}")
    say(f"records of shape {shape}; groups: {', '.join(described['groups'])}\n")
    largest = max(silo["records"] for silo in described["silos"])
    rows = table("silo", "records", "", "groups", "labels", right=("records",))
    for silo in described["silos"]:
        bar = "█" * max(1, round(BAR_WIDTH * silo["records"] / largest))
        present = ", ".join(group for group, count in silo["groups"].items() if count)
        rows.add_row(silo["silo"], f"{silo['records']:,}", bar, present, _histogram(list(silo["classes"].values())))
    show(rows)
    if federation.classes:
        show(f"\nlabels, from left to right: {', '.join(federation.classes)}")


def _histogram(counts: list[int]) -> str:
    """One character a class, as high as its share of the silo's most frequent class; none has a dot."""
    highest = max(counts, default=0)
    return "".join(LEVELS[(count * len(LEVELS) - 1) // highest] if count else "·" for count in counts)
