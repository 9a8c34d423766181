"""``fedloom synthesize`` and ``fedloom export``: what is handed on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.output import Json, plural, say, show_json, terminal
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.release.provenance import Limits

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A finished run's folder.", show_default=False)]
Licence = Annotated[str, typer.Option(help="What the card says may be done with it.")]
Policies = Annotated[
    list[Path] | None,
    typer.Option("--policy", help="A silo's policy.toml to keep to; may be repeated.", show_default=False),
]
AcceptRisk = Annotated[
    bool, typer.Option("--accept-risk", help="Hand it on although something stands against it; the card says so.")
]


def synthesize(
    folder: Folder,
    n: Annotated[int, typer.Option(help="How many records, over all groups.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The new folder of the data set.", show_default=False)],
    form: Annotated[str, typer.Option("--format", help="folder (of images), npz, parquet or csv.")] = "folder",
    labels: Annotated[
        str,
        typer.Option(
            help="balanced, prior: as the run knows them, or shares that you ask for: CLASS=SHARE,...",
            show_default="prior, with labels",
        ),
    ] = "",
    pathway: Annotated[str, typer.Option(help="A way to generate; the first that is open unless told.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same records.")] = 0,
    licence: Licence = "unknown",
    policy: Policies = None,
    accept_risk: AcceptRisk = False,
    device: Annotated[str, typer.Option(help="Where records are generated: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Generate a data set of every group and class, with a card and checksums."""
    limits = _limits(policy or ())
    with terminal().status("loading"):
        from rich.progress import Progress

        from fedloom.experiment import load, torch_device
        from fedloom.release.synthesis import SynthesisOrder, synthesize

        order = SynthesisOrder(
            records=n,
            form=form,
            labels=labels,
            pathway=pathway,
            seed=seed,
            licence=licence,
            device=torch_device(device),
        )
        run = load(folder)
    console = terminal()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("generating", total=max(n, 1))
        made = synthesize(
            run,
            out,
            order,
            limits=limits,
            accept_risk=accept_risk,
            progress=lambda done, of: bar.update(task, completed=done, description=of),
        )
    _tell(out, made, f"{plural(n, 'record')} of {plural(len(made['counts']), 'group')}", as_json)


def export(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The new folder of the generators.", show_default=False)],
    form: Annotated[str, typer.Option("--format", help="safetensors or onnx.")] = "safetensors",
    licence: Licence = "unknown",
    policy: Policies = None,
    accept_risk: AcceptRisk = False,
    as_json: Json = False,
) -> None:
    """Write a run's generators for others, with a card and checksums."""
    limits = _limits(policy or ())
    with terminal().status("loading") as status:
        from fedloom.experiment import load
        from fedloom.release.export import export

        made = export(
            load(folder),
            out,
            form,
            licence=licence,
            limits=limits,
            accept_risk=accept_risk,
            progress=lambda file: status.update(f"writing {file}"),
        )
    _tell(out, made, f"generators of {plural(len(made['groups']), 'group')} as {form}", as_json)


def _limits(paths: Iterable[Path]) -> list[Limits]:
    """What policy files allow; one that asks for no privacy allows anything."""
    from fedloom.deployment.policy import Policy
    from fedloom.release.provenance import Limits

    found = []
    for path in paths:
        try:
            policy = Policy.of(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--policy = '{path}' cannot be read ({error})") from error
        if policy.privacy != "none":
            found.append(Limits(policy.max_epsilon, policy.max_delta))
    return found


def _tell(out: Path, made: dict[str, Any], what: str, as_json: bool) -> None:
    if as_json:
        show_json({"out": str(out), **made})
    else:
        say(f"{out}: {what}; README.md is its card")
