"""``fedloom federation``: a server and silos on machines of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, say, say_facts, show, show_json, table
from fedloom.cli.running import stop_signals, tend_until_stopped
from fedloom.errors import ConfigError

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


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's new folder.", show_default=False)],
    silos: Annotated[
        str, typer.Option(help="Their names, as a,b,c; or with groups, as ct:a,ct:b,mri:c.", show_default=False)
    ],
    address: Annotated[str, typer.Option(help="Where silos reach the server, host:port.", show_default=False)],
    shape: Annotated[
        str, typer.Option(help="The size of one record, such as 1,28,28.", show_default="with --schema, its columns")
    ] = "",
    modality: Annotated[
        str, typer.Option(help="What a record is.", show_default="image or vector, as the shape says")
    ] = "",
    schema: Annotated[
        Path | None, typer.Option(help="A table's schema.toml, which says what a record is.", show_default=False)
    ] = None,
    classes: Annotated[str, typer.Option(help="Names of the labels, as a,b,c; none: records have no label.")] = "",
    name: Annotated[str, typer.Option(help="The federation's name.", show_default="the folder's")] = "",
    records: Annotated[
        str, typer.Option(help="The most records of each silo, as a=600,b=450; none: all silos weigh the same.")
    ] = "",
) -> None:
    """Found a federation: authority, server certificate, and an invitation for each silo."""
    from fedloom.deployment.charter import Charter
    from fedloom.deployment.directories import ServerDirectory, ServerSettings
    from fedloom.engines.flower.rules import RoundRules
    from fedloom.privacy.signatures import fingerprint

    modality, sizes = _kind_of(modality, shape, schema)
    charter = Charter(
        name=name or folder.resolve().name.lower(),
        address=address,
        silos=dict(map(_with_group, _names(silos))),
        shape=sizes,
        modality=modality,
        classes=tuple(_names(classes)),
        records=dict(map(_with_count, _names(records))),
    )
    home = ServerDirectory.create(folder, charter, ServerSettings(), RoundRules())
    say_facts(
        {
            "federation": f"{charter.name}, {len(charter.silos)} silos, {charter.address}",
            "authority": fingerprint(home.authority.encode()),
            "settings": str(folder / "federation.toml"),
            "invitations": str(folder / "invitations"),
            "next": "send each silo its invitation, and tell it the authority's fingerprint by another way",
        }
    )


@app.command("enroll")
def enroll(
    invitation: Annotated[Path, typer.Argument(metavar="INVITATION", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option("--out", help="The silo's new folder.", show_default="./<silo>")
    ] = None,
) -> None:
    """Accept an invitation: the silo's key is made here, and only its public half is to be sent back."""
    from fedloom.deployment.directories import Invitation, SiloDirectory
    from fedloom.deployment.keys import read_public_key
    from fedloom.privacy.signatures import fingerprint

    found = Invitation.read(invitation)
    home = SiloDirectory.create(folder or Path(found.silo), found)
    say_facts(
        {
            "silo": f"{found.silo} of federation {found.charter.name} at {found.charter.address}",
            "authority": f"{found.fingerprint}   (compare with the coordinator's)",
            "key": fingerprint(read_public_key(home.public_key)[1]),
            "send": f"{home.public_key} to the coordinator, for 'fedloom federation admit'",
            "policy": f"{home.path / 'policy.toml'} agrees to nothing yet: edit it",
            "then": f"fedloom federation join {home.path} --data PATH",
        }
    )
    say("")
    say(home.public_key.read_text(encoding="utf-8").strip())


@app.command("admit")
def admit(
    folder: ServerDir,
    key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="What 'enroll' made.", show_default=False)],
) -> None:
    """Let the holder of a key join as the silo that it names; a server that runs notices by itself."""
    from fedloom.deployment.directories import ServerDirectory

    silo, found = ServerDirectory.open(folder).admit(key)
    say_facts({"silo": silo, "key": f"{found}   (compare with the silo's)"})


@app.command("renew")
def renew(folder: ServerDir) -> None:
    """Make a new server certificate, before the old one expires; silos trust it without being told."""
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.keys import make_server_certificate

    home = ServerDirectory.open(folder)
    ends = make_server_certificate(home.keys, home.charter.host)
    say(f"the server's certificate holds until {ends:%Y-%m-%d}; stop and start 'fedloom federation serve {folder}'")


@app.command("serve")
def serve(
    folder: ServerDir,
    proxy: Annotated[bool, typer.Option(help="Put nginx before the SuperLink, which listens on loopback.")] = True,
    health: Health = None,
) -> None:
    """Run the server until Ctrl-C: SuperLink, proxy, and the register of who may join."""
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.operating import operated
    from fedloom.deployment.processes import require_flower
    from fedloom.deployment.serving import Serving

    require_flower()
    home = ServerDirectory.open(folder)
    with (
        stop_signals(),
        operated(home, say, health) as operation,
        Serving(home, operation.say, proxy=proxy) as serving,
    ):
        operation.say(f"federation '{home.charter.name}' is served at {home.charter.address}; Ctrl-C stops it")
        tend_until_stopped(serving.tend, operation.beat)


@app.command("join")
def join(
    folder: SiloDir,
    data: Annotated[
        Path, typer.Option(help="The silo's records: a table, an .npz file or a folder.", show_default=False)
    ],
    source: Annotated[
        str, typer.Option(help="How to read them: a data set's name.", show_default="npz, or images in a folder")
    ] = "",
    health: Health = None,
) -> None:
    """Take part until Ctrl-C, with the records at PATH, in what policy.toml agrees to."""
    from fedloom.deployment.directories import SiloDirectory
    from fedloom.deployment.joining import Joining
    from fedloom.deployment.operating import operated
    from fedloom.deployment.processes import require_flower

    require_flower()
    home = SiloDirectory.open(folder)
    with (
        stop_signals(),
        operated(home, say, health) as operation,
        Joining(home, data, operation.say, source=source) as joining,
    ):
        operation.say(f"silo '{home.name}' takes part in '{home.invitation.charter.name}'; its logs are in {home.logs}")
        tend_until_stopped(joining.tend, operation.beat)


@app.command("statement")
def statement(
    folder: SiloDir,
    bundle: Annotated[Path, typer.Argument(help="statements.json of the run's folder.", show_default=False)],
    data: Annotated[Path, typer.Option(help="The silo's records, as for 'join'.", show_default=False)],
    source: Annotated[str, typer.Option(help="How to read them.", show_default="as for 'join'")] = "",
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="./<silo>.statement.json")] = None,
) -> None:
    """Sign what a run cost this silo's data and what left, into a file to be mailed: the silo missed the run's end."""
    from fedloom.deployment.directories import SiloDirectory
    from fedloom.deployment.signing import Signatory
    from fedloom.deployment.worker import service
    from fedloom.engines.flower.statement_frames import question, statement_in
    from fedloom.privacy.statements import canonical, read_bundle
    from fedloom.runs.files import write_atomically

    home, asked = SiloDirectory.open(folder), question(read_bundle(bundle))
    found = statement_in(Signatory.of(home).passed(asked, service(home, data, source).answer(asked)))
    path = out or Path(f"{home.name}.statement.json")
    write_atomically(path, canonical(found.to_mapping()) + b"\n")
    say_facts(
        {
            "silo": home.name,
            "run": found.body.run,
            "epsilon": _epsilon(found.body.epsilon, found.body.delta),
            "key": found.body.key,
            "send": f"{path} to the coordinator, for 'fedloom federation collect'",
        }
    )


@app.command("collect")
def collect(
    folder: ServerDir,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    statements: Annotated[list[Path], typer.Argument(help="What 'statement' made at silos.", show_default=False)],
) -> None:
    """Put statements that came by mail into a run's bundle."""
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.gathering import collect
    from fedloom.runs.folder import RunFolder

    found = RunFolder.open(run)
    lacking = collect(ServerDirectory.open(folder), found, statements)
    say_facts({"bundle": str(found.statements), "missing": ", ".join(lacking) or "none"})


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
    rows = table("silo", "group", "key", "there")
    for silo in found["silos"]:
        rows.add_row(silo["silo"], silo["group"], "admitted" if silo["admitted"] else "missing", silo["there"])
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
    from fedloom.deployment.processes import require_flower

    require_flower()
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


def _epsilon(epsilon: float, delta: float) -> str:
    from fedloom.privacy.ledger import format_epsilon

    return f"{format_epsilon(epsilon)} at delta {delta:g}" if epsilon < float("inf") else "no DP guarantee"


def _kind_of(modality: str, shape: str, schema: Path | None) -> tuple[str, tuple[int, ...]]:
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
