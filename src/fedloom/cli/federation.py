"""``fedloom federation``: a server and silos on machines of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli.output import Json, say, say_facts, show, show_json, table
from fedloom.cli.running import stop_signals, tend_until_stopped
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.deployment.charter import Charter

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="Run experiments across machines: a server, and silos that stay home.",
)

Health = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Answer /healthz and /metrics on this port of loopback.", show_default="nowhere"),
]
ServerDir = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.", show_default=False)]
SiloDir = Annotated[Path, typer.Argument(metavar="DIR", help="The silo's folder.", show_default=False)]
Silos = Annotated[
    str, typer.Option(help="Their names, as a,b,c; or with groups, as ct:a,ct:b,mri:c.", show_default=False)
]
Shape = Annotated[
    str, typer.Option(help="The size of one record, such as 1,28,28.", show_default="with --schema, its columns")
]
Modality = Annotated[str, typer.Option(help="What a record is.", show_default="image or vector, as the shape says")]
Schema = Annotated[
    Path | None, typer.Option(help="A table's schema.toml, which says what a record is.", show_default=False)
]
Classes = Annotated[str, typer.Option(help="Names of the labels, as a,b,c; none: records have no label.")]
Name = Annotated[str, typer.Option(help="The federation's name.", show_default="the folder's")]
Records = Annotated[
    str, typer.Option(help="The most records of each silo, as a=600,b=450; none: all silos weigh the same.")
]


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's new folder.", show_default=False)],
    silos: Silos,
    address: Annotated[str, typer.Option(help="Where silos reach the server, host:port.", show_default=False)],
    shape: Shape = "",
    modality: Modality = "",
    schema: Schema = None,
    classes: Classes = "",
    name: Name = "",
    records: Records = "",
) -> None:
    """Found a federation: authority, server certificate, and an invitation for each silo."""
    from fedloom.deployment.directories import ServerDirectory, ServerSettings
    from fedloom.engines.remote.rules import RoundRules
    from fedloom.privacy.signatures import fingerprint

    name = name or folder.resolve().name.lower()
    charter = charter_of(name, silos, kind_of(modality, shape, schema), classes, records, address)
    home = ServerDirectory.create(folder, charter, ServerSettings(), RoundRules())
    say_facts(
        {
            "federation": f"{charter.name}, {len(charter.silos)} silos, {charter.address}",
            "authority": fingerprint(home.authority.encode()),
            "settings": str(folder / "federation.toml"),
            "next": f"fedloom federation serve {folder}; send each silo its file of {folder / 'invitations'}, and tell "
            "it the authority's fingerprint by another way",
        }
    )


def charter_of(
    name: str,
    silos: str,
    kind: tuple[str, tuple[int, ...]],
    classes: str,
    records: str,
    address: str = "",
    wire: Literal["direct", "flower", "nvflare"] = "direct",
) -> Charter:
    """The charter that options say."""
    from fedloom.deployment.charter import Charter

    return Charter(
        name=name,
        address=address,
        silos=dict(map(_with_group, _names(silos))),
        shape=kind[1],
        modality=kind[0],
        classes=tuple(_names(classes)),
        records=dict(map(_with_count, _names(records))),
        wire=wire,
    )


@app.command("serve")
def serve(
    folder: ServerDir,
    health: Health = None,
) -> None:
    """Run the server until Ctrl-C."""
    from fedloom.deployment.direct.serving import DirectServing
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.operating import operated

    home = ServerDirectory.open(folder)
    with (
        stop_signals(),
        operated(home, say, health) as operation,
        DirectServing(home, operation.say) as server,
    ):
        operation.watch(server.household.children)
        operation.say(f"federation '{home.charter.name}' is served at {home.charter.address}; Ctrl-C stops it")
        tend_until_stopped(server.tend, operation.beat)


@app.command("join")
def join(
    folder: Annotated[
        Path, typer.Argument(metavar="INVITATION|DIR", help="An invitation, or a silo's folder.", show_default=False)
    ],
    data: Annotated[
        Path, typer.Option(help="The silo's records: a table, an .npz file or a folder.", show_default=False)
    ],
    source: Annotated[
        str, typer.Option(help="How to read them: a data set's name.", show_default="npz, or images in a folder")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="With an invitation: the silo's folder.", show_default="./<silo>")
    ] = None,
    proxy: Annotated[
        str, typer.Option(help="An HTTP proxy on the way, http://host:port.", show_default="$https_proxy")
    ] = "",
    health: Health = None,
) -> None:
    """Take part until Ctrl-C, with the records at PATH, in what policy.toml agrees to."""
    from fedloom.cli.federation_keys import enrolled
    from fedloom.deployment.directories import Invitation, SiloDirectory
    from fedloom.deployment.joining import Joining
    from fedloom.deployment.operating import operated

    if folder.is_file():
        invitation = Invitation.read(folder)
        folder = out or Path(invitation.silo)
        home = (
            SiloDirectory.open(folder).invited(invitation)
            if SiloDirectory.is_at(folder)
            else enrolled(invitation, folder)
        )
    else:
        home = SiloDirectory.open(folder)
    with (
        stop_signals(),
        operated(home, say, health) as operation,
        Joining(home, data, operation.say, source=source, proxy=proxy) as joining,
    ):
        operation.watch(joining.household.children)
        operation.say(f"silo '{home.name}' takes part in '{home.invitation.charter.name}'; its logs are in {home.logs}")
        tend_until_stopped(joining.tend, operation.beat)


@app.command("status")
def status(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A federation's folder, or a silo's.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Show who was admitted, who is there, and how the last runs ended; of a silo, what it refused."""
    from fedloom.deployment.directories import ServerDirectory, SiloDirectory
    from fedloom.deployment.status import server_status, silo_status

    if SiloDirectory.is_at(folder):
        of_silo = silo_status(SiloDirectory.open(folder))
        if as_json:
            show_json(of_silo)
            return
        say(
            f"silo '{of_silo['silo']}' of '{of_silo['federation']}': "
            + ("joined" if of_silo["joined"] else "not joined")
        )
        for line in [*of_silo["refused"], *of_silo["warnings"]]:
            say(line)
        return
    found = server_status(ServerDirectory.open(folder))
    if as_json:
        show_json(found)
        return
    say(f"federation '{found['name']}' at {found['address']}: " + ("served" if found["served"] else "not served"))
    rows = table("silo", "group", "key", "there", "device")
    for silo in found["silos"]:
        rows.add_row(silo["silo"], silo["group"], silo["key"], silo["there"], silo["device"])
    show(rows)
    for run in found["runs"]:
        say(f"{run['folder']}: {run['state']}")
    for warning in found["warnings"]:
        say(warning)


@app.command("demo")
def demo(
    out: Annotated[Path, typer.Option(help="The folder for all of it.")] = Path("runs/federation-demo"),
    rounds: Annotated[int, typer.Option(help="How many.", min=1)] = 3,
    silos: Annotated[int, typer.Option(help="Of each of the two groups.", min=1)] = 1,
) -> None:
    """Run the embedded Mixed MNIST experiment on a whole federation of this machine, and stop it again."""
    from fedloom.config import load_config
    from fedloom.deployment.demo import demonstrate

    config = load_config("demo", [f"rounds={rounds}", f"data.silos={silos}", "participation.rate=1.0"])
    with stop_signals():
        run = demonstrate(out, config, say)
    say_facts(
        {
            "server": f"{run}: what the server got to see",
            "silos": f"{out}/<silo>/runs: what each silo keeps to itself",
            "next": f"fedloom inspect {run}",
        }
    )


def kind_of(modality: str, shape: str, schema: Path | None) -> tuple[str, tuple[int, ...]]:
    """What a record is, and its size: as a table's schema says, or as is told."""
    if schema is not None:
        if shape or modality:
            raise ConfigError("--schema says what a record is: leave out --shape and --modality")
        from fedloom.federation.tables import read_schema
        from fedloom.modalities.table import modality_name

        found = read_schema(schema)
        return modality_name(found), (len(found.columns),)
    if not shape:
        raise ConfigError("--shape is missing: give the size of one record, such as 1,28,28, or a table's --schema")
    if modality:
        from fedloom.modalities.base import modality_of

        try:
            modality_of(modality, ())  # silos follow no import path that a charter gives them
        except ConfigError as error:
            raise ConfigError(f"--modality: {error}") from error
    return modality, tuple(_whole(size, "--shape", "1,28,28") for size in _names(shape))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _with_group(text: str) -> tuple[str, str]:
    group, colon, silo = text.partition(":")
    return (silo, group) if colon else (text, "all")


def _with_count(text: str) -> tuple[str, int]:
    silo, _, count = text.partition("=")
    return silo.strip(), _whole(count.strip() or text, "--records", "a=600,b=450")


def _whole(text: str, option: str, example: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{option}: '{text}' must be a whole number, as in {example}")
    return int(text)
