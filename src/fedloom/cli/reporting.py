"""``fedloom report``: one page that people look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, plural, say, show_json, terminal


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file to write.", show_default="DIR/report.html; report.html for several runs"),
    ] = None,
    with_records: Annotated[
        bool, typer.Option("--with-records", help="Show records of silos that are not public; the page then says so.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several compared, and its numbers as JSON beside it."""
    with terminal().status("reading"):
        from fedloom.experiment import load
        from fedloom.reports.report import write_report

        file = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
        write_report([load(folder) for folder in folders], file, with_records=with_records)
    if as_json:
        show_json({"out": str(file), "json": str(file.with_suffix(".json")), "runs": [str(one) for one in folders]})
    else:
        say(f"{file}: {plural(len(folders), 'run')}")
