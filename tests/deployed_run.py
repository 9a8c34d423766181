"""The folder of a finished run of a federation, as its server would leave it, with what its silos have signed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedloom.config import Config
from fedloom.privacy.statements import Bundle
from fedloom.runs.files import write_folder_atomically
from fedloom.runs.folder import DataSource, RunFolder
from fedloom.settings import parse

DATA = DataSource("the silos of federation fed", "a digest of records")


def deployed_run(path: Path, bundle: Bundle, *, stated: bool = True) -> RunFolder:
    """A run in which exactly that left which the bundle says was taken; ``stated``: whether the bundle lies in it."""
    folder = RunFolder.create(path, parse(Config, tomllib.loads(bundle.experiment)), DATA)
    folder.note({"engine_choice": {"name": "flower", "run": bundle.run}})
    for number, came in bundle.participants.items():
        sent = [
            {"round": int(number), "silo": silo, "bytes": 8, "blocks": {"decoder@all": {}}, "payloads": {"records": {}}}
            | {"sha256": digest}
            for silo, digest in came.items()
        ]
        folder.record_round({"round": int(number)}, sent)
    files = {"index.json": b"{}", "server.safetensors": b"generators"}
    write_folder_atomically(path / "checkpoints" / f"round-{len(bundle.participants):04d}", files)
    folder.end("finished", len(bundle.participants))
    if stated:
        folder.statements.write_bytes(bundle.to_bytes())
    return folder
