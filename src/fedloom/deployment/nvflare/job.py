"""A job as a folder for ``nvflare job submit``: it names two classes that every machine has installed itself."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.deployment.hosted.run import HostedRun
from fedloom.errors import RunFolderError
from fedloom.runs.files import folder_appearing

CONDUCTOR = "fedloom.deployment.nvflare.conductor.Conductor"
EXECUTOR = "fedloom.deployment.nvflare.executor.SiloExecutor"
TASK = "fedloom"
FRAME, CHARTER = "frame", "charter"  # what a task holds, and the first of them its result too
TOLD = "fedloom.toml"  # beside the server's configuration
SITE_CONFIG = "config/config_fed_client.json"
# All that a site is sent before a job. A hardened site takes these bytes and no others, so nothing here may be a matter
# of the experiment: that comes with the tasks, and is the silo's policy to accept.
SITE_TEXT = json.dumps(
    {
        "format_version": 2,
        "executors": [{"tasks": [TASK], "executor": {"path": EXECUTOR, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    },
    indent=2,
).encode()


def write_job(hosted: HostedRun, folder: Path) -> None:
    """Into a new folder."""
    if folder.exists():
        raise RunFolderError(f"{folder} exists already; choose another --out")
    silos = list(hosted.charter.silos)
    meta = {
        "name": f"fedloom-{hosted.charter.name}",
        "deploy_map": {"server": ["server"], "sites": silos},
        "min_clients": len(silos),  # a site that comes after the start of a job has no part in it
        "resource_spec": {},
    }
    server = {
        "format_version": 2,
        "server": {"task_request_interval": 0.2},  # seconds after which a site asks for its next task; else 2
        "workflows": [{"id": TASK, "path": CONDUCTOR, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    files = {
        "meta.json": json.dumps(meta, indent=2).encode(),
        "server/config/config_fed_server.json": json.dumps(server, indent=2).encode(),
        f"server/config/{TOLD}": tomli_w.dumps(hosted.told(), multiline_strings=True).encode(),
        f"sites/{SITE_CONFIG}": SITE_TEXT,
    }
    with folder_appearing(folder) as temporary:
        for name, data in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)


def read_told(app: Path) -> dict[str, Any]:
    """What the server's half is told, in the folder of its app."""
    return tomllib.loads((app / "config" / TOLD).read_text(encoding="utf-8"))
