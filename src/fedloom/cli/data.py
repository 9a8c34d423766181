"""``fedloom data``: obtain data sets, and look at who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedloom.cli.output import (
    Json,
    Overrides,
    complain,
    completed_preset,
    plural,
    say,
    show,
    show_json,
    table,
    terminal,
)
from fedloom.config import Config, DataConfig, load_config
from fedloom.errors import ConfigError, page_path, unknown
from fedloom.presets import preset_names
from fedloom.settings import override, parse

if TYPE_CHECKING:
    from fedloom.federation.picture_check import PictureReport
    from fedloom.federation.records import Federation

app = typer.Typer(no_args_is_help=True, suggest_commands=False, help="Obtain data sets, and see who holds what.")

LEVELS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 16
SHOWN = 100  # findings
FILES = (".npz", ".csv", ".parquet")
LISTED_BY = "'fedloom list datasets' and 'fedloom list presets' name them"


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


@app.command("schema")
def schema(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="CSV or Parquet.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The schema's new file.", show_default="shown, and not written")
    ] = None,
) -> None:
    """Propose a table's schema, and mark what was read off the records: that is for people to declare public."""
    from fedloom.federation.schema_proposal import proposed_schema
    from fedloom.runs.files import write_atomically

    text = proposed_schema(files)
    if out is None:
        typer.echo(text, nl=False)
        return
    if out.exists():
        raise ConfigError(f"--out {out} exists already; nothing was written")
    write_atomically(out, text.encode())
    say(f"{out}: read every line, and replace or declare public what is marked; then 'fedloom data show table'")


@app.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="A folder that holds a folder of pictures for each silo.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """List what is odd in folders of pictures, file by file, and propose the data section of a run.toml.

    Exit code 1 where no settings would do.
    """
    from fedloom.federation.picture_check import check_pictures
    from fedloom.federation.picture_files import PictureRule
    from fedloom.federation.picture_folders import Layout

    config = parse(Config, override({"data": {"source": "image-folders", "path": str(path)}}, overrides or [])).data
    found = check_pictures(path.expanduser(), Layout(PictureRule.of(config), config.subjects))
    if as_json:
        show_json(
            {
                **asdict(found),
                "findings": [
                    {"file": str(each.file), "what": each.what, "stops": each.stops} for each in found.findings
                ],
            }
        )
    else:
        _print_checked(found, config)
    if not found.is_usable:
        raise typer.Exit(1)


def _print_checked(found: PictureReport, config: DataConfig) -> None:
    import tomli_w

    say(f"{plural(found.pictures, 'picture')} at {plural(found.silos, 'silo')}")
    for name, counts in (("sizes", found.sizes), ("kinds", found.kinds)):
        say(f"{name}: " + ", ".join(f"{kind} ({count:,})" for kind, count in counts.items()))
    say(f"{plural(len(found.findings), 'finding')}" + (":" if found.findings else ""))
    for each in found.findings[:SHOWN]:
        say(f"  {each.file} {each.what}")
    if len(found.findings) > SHOWN:
        say(f"  and {len(found.findings) - SHOWN:,} more; --json lists all")
    if not found.is_usable:
        say("\nsome files cannot be learned from: take them away, or mend them")
        return
    chosen = {name: getattr(config, name) for name in ("size", "crop", "mode", "window", "subjects")}
    usual = {field.name: field.default for field in fields(DataConfig)}
    own = {name: value for name, value in chosen.items() if value != usual[name]}
    say("\na data section to start from:\n")
    section = {"source": "image-folders", "path": config.path, **found.settings, **own}
    typer.echo(tomli_w.dumps({"data": section}), nl=False)
    if "window" in found.settings and "window" not in own:
        say("# the window was read off the records: a public one, such as the device's, gives nothing away")


@app.command("show")
def show_federation(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A data set, a preset, or a FILE.toml.",
            show_default=False,
            autocompletion=completed_preset,
        ),
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show the silos that a data set or preset makes: their records, groups and labels."""
    from fedloom.federation.building import build_federation, redealt
    from fedloom.streams import Streams

    config = _config(name, overrides or [])
    federation = build_federation(config.data, Streams(config.seed))
    found = _described(federation)
    if as_json:
        show_json(found)
    else:
        _print(found)
    if sentence := redealt(federation):
        complain("Warning", sentence, typer.colors.YELLOW)


def _config(name: str, overrides: list[str]) -> Config:
    from fedloom.federation.sources import SOURCES

    if name in SOURCES:
        return parse(Config, override({"data": {"source": name}}, overrides))
    if Path(name).is_dir() or name.endswith(FILES):
        source = "image-folders" if Path(name).is_dir() else "npz" if name.endswith(".npz") else "table"
        raise ConfigError(f"'{name}' is no data set's name; say {source} data.path={name} to show what is in it")
    if name not in preset_names() and not name.endswith(".toml"):
        raise ConfigError(unknown("data set or preset", name, [*SOURCES, *preset_names()], LISTED_BY))
    return load_config(name, overrides)


def _described(federation: Federation) -> dict[str, Any]:
    from fedloom.federation.building import describe

    return {
        "name": federation.name,
        "modality": federation.modality.name,
        "shape": list(federation.shape),
        "groups": list(federation.groups),
        "classes": list(federation.classes),
        "held_out": len(federation.test),
        "count": len(federation),
        "silos": [asdict(silo) for silo in describe(federation)],
    }


def _print(found: Mapping[str, Any]) -> None:
    from fedloom.federation.arrays import ONE_GROUP
    from fedloom.modalities.base import modality_of

    shape = " x ".join(map(str, found["shape"]))
    say(f"{found['name']}: {plural(found['count'], 'silo')}, {plural(found['held_out'], 'held-out record')}")
    say(f"{modality_of(found['modality'], ()).plural} of shape {shape}; groups: {', '.join(found['groups'])}")
    if found["groups"] == [ONE_GROUP]:
        say(f"no groups are told apart; {page_path('how-to/own-data.md')} says how to name them")
    say("")
    largest = max(silo["records"] for silo in found["silos"])
    rows = table("silo", "records", "", "groups", "labels", right=("records",))
    for silo in found["silos"]:
        bar = "█" * max(1, round(BAR_WIDTH * silo["records"] / largest))
        labels = _histogram([silo["classes"].get(name, 0) for name in found["classes"]])
        rows.add_row(silo["name"], f"{silo['records']:,}", bar, ", ".join(silo["groups"]), labels)
    show(rows)
    if found["count"] > len(found["silos"]):
        say("the others are made when they are drawn; those above are the first of each kind")
    if found["classes"]:
        show(f"\nlabels, from left to right: {', '.join(found['classes'])}")


def _histogram(counts: list[int]) -> str:
    """One character a class, as high as its share of the silo's most frequent class; a dot where there is none."""
    highest = max(counts, default=0)
    return "".join(LEVELS[(count * len(LEVELS) - 1) // highest] if count else "·" for count in counts)
