"""A site's startup kit, hardened: its own operator's settings, by which the site does what fedloom's job needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.deployment.nvflare.job import EXECUTOR, SITE_CONFIG, SITE_TEXT
from fedloom.errors import ConfigError
from fedloom.runs.files import explained, write_atomically, write_json

VERSION = "2.9.0"  # of NVFlare, whose inside the guard knows
SEAT = "fedloom.toml"  # in the kit's folder 'local'
SIGNED = ".__nvfl_"  # how the names of signatures begin
GUARD = "fedloom.deployment.nvflare.guard.SiteGuard"
ROLES = ("project_admin", "org_admin", "lead", "member")
RIGHTS = {
    "submit_job": "any",
    "manage_job": "any",
    "view": "any",
    "clone_job": "none",
    "download_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
COMPONENTS = {
    "fedloom_guard": GUARD,
    "resource_manager": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
    "resource_consumer": "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
    "process_launcher": "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
}
LOGGING = {  # in place of the kit's own, which may name what is called for it
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "plain"},
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "formatter": "plain",
            "filename": "log.txt",
            "maxBytes": 20 * 2**20,
            "backupCount": 10,
        },
    },
    "root": {"level": "INFO", "handlers": ["console", "file"]},
}
NEEDED = {"resource_manager": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}}  # arguments


def harden(kit: Path, home: Path, data: Path, source: str = "") -> str:
    """Write the kit's local settings; returns the site's name. What else could give it orders has to go first."""
    with explained(kit / "startup" / "fed_client.json"):
        text = (kit / "startup" / "fed_client.json").read_text(encoding="utf-8")
    name = _name_in(_settings(text))
    if not data.exists():
        raise ConfigError(f"--data {data} is not there")
    for found in sorted((*kit.glob("*/*resources.json"), *kit.glob("*/custom"), kit / "local" / "privacy.json")):
        if found.exists() and found != kit / "local" / "resources.json":
            raise ConfigError(f"{found} could have this site do what nobody here has agreed to; remove it first")
    for app in sorted(kit.glob("*/app_*")):
        if not _is_ours(app):
            raise ConfigError(f"{app.parent} is of a job that a server could start again; remove it first")
    seat = {"home": str(home.absolute()), "data": str(data.absolute()), "source": source}
    settings = {
        "resources.json": _resources(),
        "authorization.json": {"format_version": "1.0", "permissions": dict.fromkeys(ROLES, RIGHTS)},
        "log_config.json": LOGGING,
    }
    for file, content in settings.items():
        write_json(kit / "local" / file, content)
    write_atomically(kit / "local" / SEAT, tomli_w.dumps({key: value for key, value in seat.items() if value}).encode())
    return name


def _is_ours(app: Path) -> bool:
    """Whether a job's app is the one that fedloom writes for sites; NVFlare's own signatures may lie beside."""
    files = {file for file in app.rglob("*") if not (file.is_dir() or file.name.startswith(SIGNED))}
    return files == {app / SITE_CONFIG} and (app / SITE_CONFIG).read_bytes() == SITE_TEXT


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the kit's startup/fed_client.json cannot be read: {error}") from error
    others = sorted(set(found) - {"format_version", "servers", "client", "require_signed_jobs"})
    if others:
        raise ConfigError(f"the kit's startup/fed_client.json holds '{others[0]}', which a site's kit does not need")
    return dict(found)


def _name_in(settings: dict[str, Any]) -> str:
    name = settings.get("client", {}).get("fqsn", "")
    if not name:
        raise ConfigError("the kit's startup/fed_client.json does not say which site it is (client.fqsn)")
    return str(name)


def _resources() -> dict[str, Any]:
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [EXECUTOR],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [{"id": key, "path": path, "args": NEEDED.get(key, {})} for key, path in COMPONENTS.items()],
    }
