"""``fedloom federation``: experiments in federations that others run, with Flower or with NVFlare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli.federation import Classes, Modality, Name, Records, Schema, Shape, Silos, app, charter_of, kind_of
from fedloom.cli.output import say_facts

if TYPE_CHECKING:
    from fedloom.deployment.hosted.run import HostedRun

Source = Annotated[str, typer.Argument(metavar="RUN.toml", help="A preset or a TOML file.", show_default=False)]


@app.command("app")
def flower_app(
    source: Source,
    silos: Silos,
    out: Annotated[Path, typer.Option(help="The app's new folder.", show_default=False)],
    shape: Shape = "",
    modality: Modality = "",
    schema: Schema = None,
    classes: Classes = "",
    name: Name = "",
    records: Records = "",
) -> None:
    """Write an experiment as an app for 'flwr run', in a Flower federation that others run."""
    from fedloom.deployment.flower.folder import write_app

    kind = kind_of(modality, shape, schema)
    hosted = _hosted(source, name or out.resolve().name.lower(), silos, kind, classes, records, "flower")
    write_app(hosted, out)
    silo = next(iter(hosted.charter.silos))
    say_facts(
        {
            "app": _what(hosted),
            "silos": f"""--node-config 'silo="{silo}" home="..." data="..."' at each SuperNode""",
            "run": f"~/{hosted.run}, where its operator lets the server's half run",
            "next": f"flwr run {out}",
        }
    )


@app.command("job")
def nvflare_job(
    source: Source,
    silos: Silos,
    out: Annotated[Path, typer.Option(help="The job's new folder.", show_default=False)],
    shape: Shape = "",
    modality: Modality = "",
    schema: Schema = None,
    classes: Classes = "",
    name: Name = "",
    records: Records = "",
) -> None:
    """Write an experiment as a job for NVFlare, in a federation that others run; silos are sites by their names."""
    from fedloom.deployment.nvflare.job import write_job

    kind = kind_of(modality, shape, schema)
    hosted = _hosted(source, name or out.resolve().name.lower(), silos, kind, classes, records, "nvflare")
    write_job(hosted, out)
    say_facts(
        {
            "job": _what(hosted),
            "sites": "fedloom federation harden KIT --home ... --data ... at each, once",
            "run": f"~/{hosted.run}, where the server's operator lets jobs run",
            "next": f"nvflare job submit -j {out}",
        }
    )


@app.command("harden")
def harden(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The site's startup kit.", show_default=False)],
    home: Annotated[Path, typer.Option(help="The silo's folder, with its policy.", show_default=False)],
    data: Annotated[Path, typer.Option(help="The silo's records.", show_default=False)],
    source: Annotated[str, typer.Option(help="Read --data as this data set.", show_default="as it is")] = "",
) -> None:
    """Settle what an NVFlare site does: fedloom's job, by its own policy, and nothing else."""
    from fedloom.deployment.nvflare.kit import VERSION, harden

    site = harden(kit, home, data, source)
    say_facts(
        {
            "site": site,
            "written": f"resources, authorization and log_config.json, and fedloom.toml, in {kit / 'local'}",
            "policy": f"{home / 'policy.toml'}, which agrees to nothing at first",
            "next": f"start the site with NVFlare {VERSION}",
        }
    )


def _hosted(
    source: str,
    name: str,
    silos: str,
    kind: tuple[str, tuple[int, ...]],
    classes: str,
    records: str,
    wire: Literal["flower", "nvflare"],
) -> HostedRun:
    """What the options say, found to be something that such a federation can do."""
    from fedloom.config import load_config
    from fedloom.deployment.hosted.run import HostedRun
    from fedloom.engines.remote.rules import RoundRules
    from fedloom.runs.files import file_name

    config = load_config(source)
    charter = charter_of(name, silos, kind, classes, records, wire=wire)
    run = f"fedloom-runs/{file_name(f'{config.name}-{config.method.name}-s{config.seed}')}"
    hosted = HostedRun(config, charter, RoundRules(), run)
    hosted.check()
    return hosted


def _what(hosted: HostedRun) -> str:
    return f"{hosted.config.name} for {len(hosted.charter.silos)} silos; experiment {hosted.config.digest()[:12]}"
