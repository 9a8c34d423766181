"""``fedloom studio``: the runs of a folder as a web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import say, terminal
from fedloom.errors import MissingExtraError


def studio(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS-FOLDER]", help="The folder that runs lie in.")] = Path(
        "runs"
    ),
    papers: Annotated[Path, typer.Option(help="Where results of papers' tables lie.")] = Path("papers"),
    host: Annotated[
        str, typer.Option(help="The address to listen at; any but loopback asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8260,
    token: Annotated[
        str, typer.Option(help="What a browser must bring.", show_default="none on loopback, else a new one")
    ] = "",
    work: Annotated[
        bool, typer.Option("--work", help="Runs may be begun, stopped and trained on from the page; asks for a token.")
    ] = False,
    with_records: Annotated[
        bool,
        typer.Option(
            "--with-records",
            help="Held-out records of own data stand beside samples, too; on this machine alone, with a token.",
        ),
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Look at runs in the browser: live progress, comparison, samples, privacy, and a walk through the latent space."""
    with terminal().status("starting"):
        try:
            from fedloom.studio.server import serve
        except ImportError as error:
            if error.name not in ("fastapi", "starlette", "uvicorn"):
                raise
            raise MissingExtraError(
                f"the studio needs the package '{error.name}'; install it with: pip install 'fedloom[studio]'"
            ) from error
    serve(folder, papers, host, port, token, not no_open, say, work, with_records)
