"""How commands speak: results on stdout, progress and complaints on stderr, one JSON object where asked for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import click
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup

from fedloom.cli.interruption import stopped
from fedloom.errors import FedloomError, FedloomWarning, page_path
from fedloom.presets import preset_names

if TYPE_CHECKING:
    from fedloom.runs.folder import RunFolder

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.", show_default=False)]
Round = Annotated[
    int | None, typer.Option("--round", help="A round whose checkpoint was kept; the newest unless told.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Settings that replace those of the preset or file."),
]


class Commands(TyperGroup):
    """The command group that turns a person's mistake into one sentence and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what is not a :class:`FedloomError` keeps its traceback."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", FedloomWarning)
            warnings.showwarning = partial(_show_warning, set())
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                raise stopped() from error
            except FedloomError as error:
                chosen = self.get_command(ctx, ctx.invoked_subcommand or "")
                page = more(error.page) if error.page else (chosen and chosen.epilog) or ""
                complain("Error", f"{error} {page}", typer.colors.RED)
                raise typer.Exit(2) from error


def more(page: str) -> str:
    """Where to read on; stands below a command's help and behind its errors."""
    return f"(more in {page_path(page)})"


def completed_preset(incomplete: str) -> list[str]:
    """What a shell offers where a preset or a file is expected; files it finds by itself where no preset fits."""
    return [name for name in preset_names() if name.startswith(incomplete)]


def _show_warning(
    said: set[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, FedloomWarning):
        if str(message) in said:
            return
        said.add(str(message))
        complain("Warning", str(message), typer.colors.YELLOW)
    else:
        typer.echo(warnings.formatwarning(message, category, filename, lineno, line), file=file, err=True, nl=False)


def complain(kind: str, sentence: str, color: str) -> None:
    """One line on stderr, whatever line breaks the sentence has picked up on its way."""
    typer.echo(f"{typer.style(f'{kind}:', fg=color, bold=True)} {' '.join(sentence.split())}", err=True)


def terminal() -> Console:
    """Where progress is shown: stderr, so that results can be piped."""
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """A line of text as it is: paths are neither wrapped nor coloured."""
    typer.echo(text)


def show(renderable: RenderableType) -> None:
    """A table, or text that may be wrapped."""
    Console(highlight=False, markup=False).print(renderable)


def show_json(value: Mapping[str, Any]) -> None:
    """The one JSON object of a command."""
    typer.echo(json.dumps(value, indent=2))


def table(*headers: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table without vertical lines; the columns named in ``right`` hold numbers."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        found.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return found


def say_facts(rows: Mapping[str, str]) -> None:
    """Names and values in two columns; values stay on one line, so that paths and commands can be copied whole."""
    width = max(map(len, rows))
    for name, value in rows.items():
        say(f"{typer.style(name.ljust(width), bold=True)}  {value}")


def say_guarantee(*folders: RunFolder) -> None:
    """Which privacy guarantee holds, in one line; of several runs whose guarantees differ, a line for each."""
    from fedloom.runs.guarantee import guarantee_of

    lines = {folder.path: guarantee_of(folder).line for folder in folders}
    if len(set(lines.values())) > 1:
        lines = {path: f"{path.name}: {line}" for path, line in lines.items()}
    for line in dict.fromkeys(lines.values()):
        say(line)


def privacy_of(folder: RunFolder) -> dict[str, Any]:
    """The same for ``--json``, where its key is ``privacy``."""
    from fedloom.runs.guarantee import guarantee_of

    return guarantee_of(folder).in_short()


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 silo``, ``2 silos``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, with hours where it takes them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
