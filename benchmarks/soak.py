"""A soak: many silos, many rounds, and kills at random of whatever runs; nothing may be lost or sent unpaid.

    python benchmarks/soak.py --silos 50 --rounds 30 --kills 60 --name soak-cpu

Every process is one of a deployment on the direct wire, with TLS; hub, executor, the run's own process and silos are
killed with SIGKILL, one at a time, at random moments. With ``--private`` the silos pay for every round from ledgers of
their own, with noise that cannot be repeated. At the end the run must be whole: every round, with every silo; what each
silo's log says has left, the server has taken, or it was made again and paid for again; and each ledger holds a charge
for each round.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import keep
from federation_round import all_there, config_of
from fedloom.config import Config, load_config
from fedloom.deployment.demo import POLICY, Neighbourhood, running, settle
from fedloom.deployment.joining import Joining
from fedloom.deployment.processes import Child
from fedloom.deployment.tail import run_at
from fedloom.engines.flower.rules import RoundRules
from fedloom.federation.building import build_federation
from fedloom.runs.files import read_lines
from fedloom.streams import Streams

RULES = RoundRules(deadline=600.0, grace=600.0, attempts=100)
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "privacy.accountant=filter", "local.batch_size=8")


def setting(silos: int, rounds: int, *, private: bool) -> tuple[Config, str]:
    """The experiment, and the policy of silos that agree to it."""
    policy = POLICY.format(method="fedvae", blocks='"encoder", "decoder"', payloads='"records"')
    config = config_of("7k", rounds, silos)
    if private:
        text = [f"rounds={rounds}", f"data.silos={(silos + 1) // 2}", "data.records_per_silo=64", *PRIVATE]
        model = ["model.hidden=[4]", "model.latent=2", "participation.rate=1.0", "evaluation.metrics=[]"]
        config = load_config("demo", ["method.name=fedvae", *text, *model, "engine.name=reference"])
        policy = policy.replace(
            'privacy = "none"', 'privacy = "dp-sgd"\nmax_epsilon = 1e6\nmax_delta = 0.1\npace = 0.0'
        )
    return config, policy


def victims(serving: Any, joined: list[Joining]) -> dict[str, list[int]]:
    """What may be killed now, by kind."""
    alive = [silo.worker for silo in joined] + [silo.node for silo in joined]
    executor = _number(serving.executor)
    found = {
        "silo": [number for child in alive if (number := _number(child))],
        "hub": [number for number in [_number(serving.hub)] if number],
        "executor": [executor] if executor else [],
    }
    if executor:
        children = Path(f"/proc/{executor}/task/{executor}/children")
        found["run"] = [int(number) for number in children.read_text().split()] if children.is_file() else []
    return {kind: numbers for kind, numbers in found.items() if numbers}


def _number(child: Child) -> int:
    return child.process.pid if child.process and child.process.poll() is None else 0


def killing(
    serving: Any, joined: list[Joining], kills: int, pause: float, over: threading.Event, seed: int
) -> Counter[str]:
    """Kill something every so often until the run is over; how often what was."""
    chance, done = random.Random(seed), Counter[str]()
    while sum(done.values()) < kills and not over.wait(pause * (0.5 + chance.random())):
        found = victims(serving, joined)
        kind = chance.choice(sorted(found))
        try:
            os.kill(chance.choice(found[kind]), signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            continue
        done[kind] += 1
    return done


def checked(place: Neighbourhood, folder: Path, rounds: int, *, private: bool) -> dict[str, int]:
    """Count what was lost, or sent without having been paid for; all must be nothing."""
    silos = len(place.silos)
    done = {row["round"]: len(row["participants"]) for row in read_lines(folder / "metrics.jsonl")}
    came = {(row["silo"], row["round"]): row["sha256"] for row in read_lines(folder / "egress.jsonl")}
    lost = sum(silos - done.get(number, 0) for number in range(1, rounds + 1))
    unknown = unpaid = charges = 0
    for home in place.silos:
        (own,) = (home.path / "runs").iterdir()
        left = {(row["silo"], row["round"], row["sha256"]) for row in read_lines(own / "egress.jsonl")}
        mine = {(silo, number, digest) for (silo, number), digest in came.items() if silo == home.name}
        unknown += len(mine - left)
        if private:
            with sqlite3.connect(home.path / "ledger.sqlite") as ledger:
                query = "SELECT round, count(*) FROM charges GROUP BY round"
                paid = dict(ledger.execute(query).fetchall())
            sent = Counter(number for _, number, _ in left)
            unpaid += sum(max(0, times - paid.get(number, 0)) for number, times in sent.items())
            charges += sum(paid.values())
    return {"updates_lost": lost, "updates_unknown_to_silos": unknown, "releases_unpaid": unpaid, "charges": charges}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two kills, on average")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="soak-cpu")
    arguments = parser.parse_args()
    config, policy = setting(arguments.silos, arguments.rounds, private=arguments.private)
    federation = build_federation(config.data, Streams(config.seed))
    with tempfile.TemporaryDirectory() as temporary:
        folder, over, killed = Path(temporary), threading.Event(), list[Counter[str]]()
        place = settle(folder, federation, policy, RULES)
        with running(place, lambda _: None, apart=False) as (serving, joined):
            while not all_there(place):
                time.sleep(1.0)
            killer = threading.Thread(
                target=lambda: killed.append(
                    killing(serving, joined, arguments.kills, arguments.pause, over, arguments.seed)
                )
            )
            start = time.monotonic()
            killer.start()
            run_at(place.server, config, folder / "run", lambda said: print(said, flush=True))
            over.set()
            killer.join()
        found: dict[str, Any] = {"silos": len(place.silos), "rounds": arguments.rounds, "private": arguments.private}
        found |= {"seconds": time.monotonic() - start, "killed": dict(killed[0])}
        found |= checked(place, folder / "run", arguments.rounds, private=arguments.private)
        found["events"] = dict(Counter(row["event"] for row in read_lines(folder / "run" / "silos.jsonl")))
    print(found)
    keep(arguments.name, [found])
    faults = found["updates_lost"] + found["updates_unknown_to_silos"] + found["releases_unpaid"]
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
