"""The app as a folder for ``flwr run``: a description, which names what every machine has installed itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.deployment.hosted.run import HostedRun
from fedloom.errors import RunFolderError
from fedloom.runs.files import write_folder_atomically

HEADING = """\
# An app for 'flwr run'. It holds no code: every machine needs the same version of fedloom, as fedloom[flower].
# A SuperNode says who it is: --node-config 'silo="NAME" home="/the/silo's/folder" data="/its/records"'
# flwr run DIR -c 'run="..."' chooses another folder for the run.
"""


def write_app(hosted: HostedRun, folder: Path) -> None:
    """Into a new folder."""
    if folder.exists():
        raise RunFolderError(f"{folder} exists already; choose another --out")
    description = {
        "project": {
            "name": "fedloom-app",
            "version": "1.0.0",
            "description": f"{hosted.config.name} in the federation {hosted.charter.name}",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedloom",
                    "components": {
                        "serverapp": "fedloom.deployment.flower.app:server",
                        "clientapp": "fedloom.deployment.flower.app:client",
                    },
                    "config": hosted.told(),
                }
            }
        },
    }
    text = HEADING + tomli_w.dumps(description, multiline_strings=True)
    write_folder_atomically(folder, {"pyproject.toml": text.encode()})


def told_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """What was told, in the run's config as Flower hands it out: tables are dotted names there."""
    rules = {key.removeprefix("rounds."): value for key, value in config.items() if key.startswith("rounds.")}
    return {**config, "rounds": rules}
