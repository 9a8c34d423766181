"""Found the compose file's federation: a server and three silos with parts of the embedded sample, each in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedloom.config import load_config
from fedloom.deployment.demo import policy_for, settle
from fedloom.engines.remote.rules import RoundRules
from fedloom.federation.building import build_federation
from fedloom.streams import Streams

FOLDER = Path("/var/lib/fedloom/demo")

if __name__ == "__main__" and not FOLDER.exists():
    config = load_config("demo", ["data.silos=2"])
    whole = build_federation(config.data, Streams(config.seed))
    federation = replace(whole, silos=whole.silos[:3])
    place = settle(FOLDER, federation, policy_for(config, federation), RoundRules(), public=True, address="server:8443")
    for number, (home, data) in enumerate(zip(place.silos, place.data, strict=True), start=1):
        print(f"silo-{number}: {home.name}")
        home.path.rename(FOLDER / f"silo-{number}")
        data.rename(FOLDER / f"silo-{number}.npz")
