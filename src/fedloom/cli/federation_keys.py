"""``fedloom federation``: who may join, by which key, and what silos sign with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.federation import ServerDir, SiloDir, app
from fedloom.cli.output import say, say_facts
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.deployment.directories import Invitation, SiloDirectory


@app.command("invite")
def invite(
    folder: ServerDir,
    silo: Annotated[str, typer.Argument(metavar="SILO", help="Its name.", show_default=False)],
) -> None:
    """Write a new invitation for a silo, which makes its older ones worthless: a code was lost, or has expired."""
    from fedloom.deployment.directories import ServerDirectory

    say(f"{ServerDirectory.open(folder).invite(silo)}: send it to silo '{silo}'")


@app.command("enroll")
def enroll(
    invitation: Annotated[Path, typer.Argument(metavar="INVITATION", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option("--out", help="The silo's new folder.", show_default="./<silo>")
    ] = None,
) -> None:
    """Accept an invitation without joining yet: the silo's key is made here, and never leaves."""
    from fedloom.deployment.directories import Invitation

    home = enrolled(Invitation.read(invitation), folder)
    say_facts(
        {
            "send": f"{home.public_key} to the coordinator, for 'fedloom federation admit'",
            "then": f"fedloom federation join {home.path} --data PATH",
        }
    )
    say("")
    say(home.public_key.read_text(encoding="utf-8").strip())


def enrolled(invitation: Invitation, folder: Path | None) -> SiloDirectory:
    """A new silo's folder, and what two people compare."""
    from fedloom.deployment.directories import SiloDirectory
    from fedloom.deployment.keys import read_public_key
    from fedloom.privacy.signatures import fingerprint

    charter = invitation.charter
    home = SiloDirectory.create(folder or Path(invitation.silo), invitation)
    say_facts(
        {
            "silo": f"{invitation.silo} of federation {charter.name} at {charter.address}, in {home.path}",
            "authority": f"{invitation.fingerprint}   (compare with the coordinator's)",
            "key": fingerprint(read_public_key(home.public_key)[1]),
            "tell": "the key to the coordinator, by another way than the invitation came",
            "policy": f"{home.path / 'policy.toml'} agrees to nothing yet: edit it",
        }
    )
    return home


@app.command("admit")
def admit(
    folder: ServerDir,
    silos: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SILO|KEY.pub]...", help="Who; none: all that ask.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="The fingerprints were compared: do not ask.")] = False,
) -> None:
    """Let the holders of keys join as the silos that they name; a server that runs notices by itself."""
    from fedloom.deployment.directories import ServerDirectory

    home = ServerDirectory.open(folder)
    asking = home.asking()
    if not silos and not asking:
        raise ConfigError(f"nobody asks to be admitted to {folder}")
    for name in silos or asking:
        if name in asking and not yes:
            typer.confirm(f"silo '{name}' shows the key {asking[name]}; is it what the silo told you?", abort=True)
        silo, found = home.admit(home.pending / f"{name}.pub" if name in asking else Path(name))
        say_facts({"silo": silo, "key": f"{found}   (compare with the silo's)"})


@app.command("revoke")
def revoke(
    folder: ServerDir,
    silo: Annotated[str, typer.Argument(metavar="SILO", help="Its name.", show_default=False)],
) -> None:
    """Take a silo's admission back, at once; 'invite' lets it come again with a new key."""
    from fedloom.deployment.directories import ServerDirectory

    ServerDirectory.open(folder).revoke(silo)
    say(f"silo '{silo}' may no longer join")


@app.command("renew")
def renew(folder: ServerDir) -> None:
    """Make new certificates before the old ones expire; silos trust the server's, and fetch theirs."""
    from fedloom.deployment.directories import ServerDirectory

    ends = ServerDirectory.open(folder).renew()
    say(f"the server's certificate holds until {ends:%Y-%m-%d}; stop and start 'fedloom federation serve {folder}'")


@app.command("approve")
def approve(
    folder: SiloDir,
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="Its file, or its digest as a refusal says.", show_default=False)
    ],
    key: Annotated[
        Path, typer.Option(help="A private key of OpenSSH's; policy.toml names its public half.", show_default=False)
    ],
) -> None:
    """Sign an experiment at a silo whose policy.toml asks for approvals."""
    from fedloom.config import load_config
    from fedloom.deployment.approvals import approve
    from fedloom.deployment.directories import SiloDirectory

    digest = load_config(experiment).digest() if experiment.endswith(".toml") else experiment
    say(f"experiment {digest} is approved: {approve(SiloDirectory.open(folder), digest, key)}")


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
    from fedloom.engines.remote.statement_frames import question, statement_in
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


def _epsilon(epsilon: float, delta: float) -> str:
    from fedloom.privacy.ledger import format_epsilon

    return f"{format_epsilon(epsilon)} at delta {delta:g}" if epsilon < float("inf") else "no DP guarantee"
