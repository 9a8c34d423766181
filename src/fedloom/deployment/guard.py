"""The command that stands before Flower's ``flwr-clientapp`` at a silo: no code that came from the server is run.

Flower sends the app along with every run and executes it. Here the app may hold nothing but a description that points
to what the silo has installed itself; anything else is refused before it is unpacked.
"""

from __future__ import annotations

import importlib
import io
import tomllib
import zipfile
from typing import Any

from fedloom.errors import FedloomError

CLIENT_APP, SERVER_APP = "fedloom.deployment.client_app:app", "fedloom.deployment.server_app:app"
DESCRIPTION = "pyproject.toml"
META = (".info/",)  # Flower's own list of what is in the archive


def check_app(archive: bytes) -> None:
    """Raise unless an app is a description alone, and describes fedloom's own."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            extra = [name for name in files.namelist() if name != DESCRIPTION and not name.startswith(META)]
            if extra:
                raise FedloomError(f"the server sent an app that brings '{extra[0]}': this silo runs no foreign code")
            tree = tomllib.loads(files.read(DESCRIPTION).decode())
        components = tree["tool"]["flwr"]["app"]["components"]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise FedloomError(f"the server sent an app that cannot be read: {error}") from error
    if components.get("clientapp") != CLIENT_APP or tree["project"].get("dependencies"):
        raise FedloomError(f"the server sent an app that is not fedloom's: {components}")


def main() -> None:
    """As ``flwr-clientapp``, with the check put before its installation of the app."""
    from flwr.supernode.cli import flwr_clientapp

    running = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    install = running.install_from_fab

    def checked(archive: bytes, *arguments: Any, **named: Any) -> Any:
        check_app(archive)
        return install(archive, *arguments, **named)

    running.install_from_fab = checked  # type: ignore[attr-defined]
    flwr_clientapp()


if __name__ == "__main__":
    main()
