"""``fedloom federation``: what keeps a federation running: doctor, audit log, backup and restore."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, more, plural, say, say_facts, show, show_json, table
from fedloom.errors import ConfigError

AnyDir = Annotated[Path, typer.Argument(metavar="DIR", help="A federation's folder, or a silo's.", show_default=False)]
NOTED = re.compile(r"(\d+):([0-9a-f]{64})")


def doctor(
    folder: AnyDir,
    data: Annotated[
        Path | None, typer.Option(help="A silo's records, as for 'join'.", show_default="they are not looked at")
    ] = None,
    source: Annotated[str, typer.Option(help="How to read them.", show_default="as for 'join'")] = "",
    as_json: Json = False,
) -> None:
    """Look at clock, disk, certificates, policy, data, versions and the server; exit 0: well, 1: soon not, 2: not."""
    from fedloom.deployment.directories import ServerDirectory, SiloDirectory
    from fedloom.deployment.doctor import Patient, examine, exit_code

    home = SiloDirectory.open(folder) if SiloDirectory.is_at(folder) else ServerDirectory.open(folder)
    found = examine(Patient(home, data, source))
    if as_json:
        rows = [{"about": each.about, "level": each.level, "said": each.said, "do": each.remedy} for each in found]
        show_json({"folder": str(folder), "code": exit_code(found), "checks": rows})
    else:
        for each in found:
            say(f"{each.level:<4}  {each.about}: {each.said}")
            if each.remedy:
                say(f"      do: {each.remedy}")
    raise typer.Exit(exit_code(found))


def audit_log(
    folder: AnyDir,
    since: Annotated[
        str, typer.Option(help="A line that was noted elsewhere, NUMBER:HASH: it must still be there.")
    ] = "",
    last: Annotated[int, typer.Option(help="How many lines to show.", min=0)] = 10,
) -> None:
    """Verify every line of the audit log, and show the last ones; note the printed line elsewhere."""
    from fedloom.operations.trail import AUDIT, Trail

    trail = Trail(folder / AUDIT)
    if not trail.path.is_file():
        raise ConfigError(f"{trail.path} is not there: nothing was asked yet, or this is no such folder")
    entries = list(trail.entries())
    if since:
        noted = NOTED.fullmatch(since)
        if noted is None:
            raise ConfigError(f"--since: '{since}' must be NUMBER:HASH, as this command prints it")
        trail.require(int(noted[1]), noted[2])
    rows = table("line", "time", "event", "of")
    for entry in entries[len(entries) - min(last, len(entries)) :]:
        told = ("silo", "run", "round", "release", "reason")
        rows.add_row(
            str(entry.number),
            entry.time,
            entry.event,
            " ".join(f"{name} {value}" for name in told if (value := entry.facts.get(name))),
        )
    show(rows)
    number, head = trail.head()
    say(f"{plural(number, 'line')}, none changed; note this one elsewhere: {number}:{head}")


def backup(
    folder: AnyDir,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.", show_default=False)],
) -> None:
    """Write a folder into one file, ledgers whole; keep it as you keep a private key, which is in it."""
    from fedloom.deployment.backup import back_up

    found = back_up(folder, file)
    say_facts({"backup": str(file), "of": f"{found.name}, {plural(len(found.files), 'file')}", "time": found.time})


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'backup' made.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)],
) -> None:
    """Unpack a backup into a new folder; a silo's pays nothing before 'confirm'."""
    from fedloom.deployment.backup import restore as unpack

    found, hold = unpack(file, folder)
    facts = {"folder": str(folder), "of": found.name, "as it was": found.time}
    if hold is not None:
        facts |= {
            "ticket": hold.ticket,
            "next": f"ask the coordinator for 'fedloom federation account DIR {found.name} {hold.ticket}'",
            "then": f"fedloom federation confirm {folder} {found.name}.account.json --data PATH",
        }
    say_facts(facts)


def account(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.", show_default=False)],
    silo: Annotated[str, typer.Argument(metavar="SILO", help="Which was restored.", show_default=False)],
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="What 'restore' printed.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="./<silo>.account.json")] = None,
) -> None:
    """Sign what a restored silo was asked by all runs, for its 'confirm'."""
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.recovery import CoordinatorAccount
    from fedloom.runs.files import write_atomically

    home = ServerDirectory.open(folder)
    found, path = CoordinatorAccount.of(home, silo, ticket), out or Path(f"{silo}.account.json")
    write_atomically(path, found.signed(home))
    say_facts({"silo": silo, "runs": str(len(found.runs)), "send": f"{path} to the silo"})


def confirm(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The restored silo's folder.", show_default=False)],
    told: Annotated[Path, typer.Argument(metavar="ACCOUNT", help="What 'account' made.", show_default=False)],
    data: Annotated[Path, typer.Option(help="The silo's records, as for 'join'.", show_default=False)],
    source: Annotated[str, typer.Option(help="How to read them.", show_default="as for 'join'")] = "",
    audit: Annotated[
        Path | None, typer.Option(help="The lost folder's audit.jsonl, if it survived: exact.", show_default=False)
    ] = None,
) -> None:
    """Fill a restored silo's ledger up with all that it may have paid since the backup, and let it pay again."""
    from fedloom.deployment.directories import SiloDirectory
    from fedloom.deployment.recovery import confirm as fill_up
    from fedloom.deployment.worker import service

    home = SiloDirectory.open(folder)
    found = fill_up(home, service(home, data, source), told, audit)
    say_facts(
        {
            "silo": home.name,
            "from the audit log": plural(found.replayed, "charge"),
            "for what was asked": plural(found.made_up, "charge"),
            "next": f"fedloom ledger {home.path / 'ledger.sqlite'}",
        }
    )


def add_to(app: typer.Typer) -> None:
    """Beside the other commands of a federation."""
    commands: dict[str, Callable[..., None]] = {
        "doctor": doctor,
        "audit": audit_log,
        "backup": backup,
        "restore": restore,
        "account": account,
        "confirm": confirm,
    }
    for name, command in commands.items():
        app.command(name, epilog=more("how-to/operate.md"))(command)
