"""What the documentation shows: its blocks of code and its commands, and how a command is checked without being run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fedloom.cli import app
from fedloom.config import load_config
from fedloom.evaluation.metric import METRICS
from fedloom.methods.base import METHODS
from fedloom.settings import parse

ROOT = Path(__file__).parents[1]
# Docstrings and help texts, which are no commands to try; test_site holds them to the source.
MADE = re.compile(r"<!-- made from the source.*?<!-- end of what is made -->", re.DOTALL)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("papers/**/*.md")),
]
MARK = re.compile(r"<!-- not run(?: \((?P<which>[^)]*)\))?: (?P<reason>[^>]{4,}?) -->\s*$")
UNMARKED = {"papers": "the papers' protocols take minutes and need their data"}
SYNOPSIS = re.compile(r"[\[\]|<>]|\.\.\.|\bSETTINGS\b")
COMMAND = typer.main.get_command(app)


@dataclass(frozen=True)
class Block:
    """A block of code, and what the mark before it says: why it is not run, and which of its commands are not."""

    page: str
    line: int
    kind: str  # python, shell, toml, text; or "" where nobody can tell
    text: str
    reason: str
    spared: tuple[str, ...]  # the beginnings of those commands; none: all of the block

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def runs(self, command: str) -> bool:
        """Whether a command of this block is to be run."""
        return not self.reason or (bool(self.spared) and not command.startswith(self.spared))

    @property
    def commands(self) -> list[str]:
        """The lines of a shell, without comments and prompts."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [part.strip() for line in found if line for part in line.split("&&")]


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").parse(MADE.sub("", page.read_text(encoding="utf-8")))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page; a mark stands just before one, alone or at the end of the text there."""
    before = ""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            mark = MARK.search(before)
            unmarked = UNMARKED.get(page.relative_to(ROOT).parts[0], "")
            reason, which = (mark["reason"], mark["which"] or "") if mark else (unmarked, "")
            spared = tuple(f"fedloom {name.strip().removeprefix('fedloom ')}" for name in which.split(",") if name)
            kind = token.info.split(" ")[0] or _kind(token.content)
            line = (token.map or [0])[0] + 1
            yield Block(str(page.relative_to(ROOT)), line, kind, token.content, reason, spared)
        before = token.content or before


def _kind(text: str) -> str:
    """What an unnamed block is: commands, TOML, or something that must be named or marked."""
    if re.match(r"(fedloom|make|pip|python|apt-get|git|\.) ", text):
        return "shell"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ""
    return "toml"


def inline_commands(page: Path) -> Iterator[str]:
    """Commands in running text, such as `fedloom list methods`."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == "code_inline" and child.content.startswith("fedloom "):
                yield child.content


def resolve(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that words begin with, and the words behind it."""
    command, context, rest = COMMAND, click.Context(COMMAND, info_name="fedloom"), list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name.isupper():  # stands for any of them
            return command, context, []
        found = command.get_command(context, name)
        assert found is not None, f"there is no command '{name}'"
        command, context = found, click.Context(found, context, info_name=name)
    return command, context, rest


def check(command: str) -> None:
    """Raise where a command, an option, a preset, a setting or a metric that it names does not exist."""
    words = shlex.split(command)[1:]
    found, context, rest = resolve(words)
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = {word.partition("=")[0] for word in rest if word.startswith("-")}
    known |= {"-h", "--help"}
    assert options <= known, f"{command}: there is no option {sorted(options - known)}"
    if SYNOPSIS.search(command) or isinstance(found, click.Group) or not rest or options & {"-h", "--help"}:
        return
    with found.make_context(context.info_name, rest, parent=context.parent) as parsed:
        if found.name == "run":
            _check_settings(parsed.params["source"], parsed.params["overrides"] or [])
        if found.name == "evaluate":
            assert set(filter(None, parsed.params["metrics"].split(","))) <= set(METRICS), command


def _check_settings(source: str, overrides: list[str]) -> None:
    config = load_config("demo" if source.endswith(".toml") or source.isupper() else source, overrides)
    assert set(config.evaluation.metrics) <= set(METRICS)
    parse(METHODS[config.method.name].options, config.method.options, "method")
