"""A soak: many silos, many rounds, and kills at random of whatever runs; nothing may be lost or sent unpaid.

    python benchmarks/soak.py --silos 50 --rounds 30 --kills 60 --name soak-cpu

Every process is one of a deployment on the direct wire, with TLS; hub, executor, the run's own process and silos are
killed with SIGKILL, one at a time, at random moments. With ``--private`` the silos pay for every round from ledgers of
their own, with noise that cannot be repeated. At the end the run must be whole: every round, with every silo; what each
silo's log says has left, the server has taken, or it was made again and paid for again; and each ledger holds a charge
for each round, and an epsilon of at least what left. After each kill nothing else is killed until the victim's place is
filled and all silos are there again: the time of that is its recovery.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import keep
from federation_round import all_there, config_of
from fedloom.config import Config, load_config
from fedloom.deployment.demo import POLICY, Neighbourhood, running, settle
from fedloom.deployment.joining import Joining
from fedloom.deployment.processes import Child
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.silo_privacy import SiloPrivacy
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
            'privacy = "none"', 'privacy = "dp-sgd"\nmax_epsilon = 16.0\nmax_delta = 0.1\npace = 0.0'
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


Recoveries = dict[str, list[float]]  # by what was killed: seconds until everything was there again


@dataclass(frozen=True)
class Killing:
    """Kill something every so often until the run is over."""

    place: Neighbourhood
    serving: Any
    joined: list[Joining]
    pause: float
    over: threading.Event
    done: Recoveries = field(default_factory=dict)

    def work(self, kills: int, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(kills):
            if self.over.wait(self.pause * (0.5 + chance.random())):
                return
            found = victims(self.serving, self.joined)
            kind = chance.choice(sorted(found))
            victim, start = chance.choice(found[kind]), time.monotonic()
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:  # it has ended by itself
                continue
            self.done.setdefault(kind, [])
            while not self._whole(kind, set(found[kind]), victim):
                if self.over.wait(0.25):
                    return
            self.done[kind].append(time.monotonic() - start)

    def _whole(self, kind: str, before: set[int], victim: int) -> bool:
        """Whether as many as before are at work, the victim not among them, and all silos are there."""
        now = set(victims(self.serving, self.joined).get(kind, ()))
        return len(now) >= len(before) and victim not in now and all_there(self.place)


def checked(place: Neighbourhood, folder: Path, rounds: int, plans: Sequence[SiloPrivacy]) -> dict[str, float]:
    """Count what was lost, or sent without having been paid for; all must be nothing."""
    silos = len(place.silos)
    done = {row["round"]: len(row["participants"]) for row in read_lines(folder / "metrics.jsonl")}
    came = {(row["silo"], row["round"]): row["sha256"] for row in read_lines(folder / "egress.jsonl")}
    lost = sum(silos - done.get(number, 0) for number in range(1, rounds + 1))
    unknown = unpaid = charges = under = 0
    spent: list[float] = []
    for home in place.silos:
        (own,) = (home.path / "runs").iterdir()
        left = {(row["silo"], row["round"], row["sha256"]) for row in read_lines(own / "egress.jsonl")}
        mine = {(silo, number, digest) for (silo, number), digest in came.items() if silo == home.name}
        unknown += len(mine - left)
        if plans:
            (plan,) = [plan for plan in plans if plan.silo == home.name]
            (account,) = read_accounts(home.path / "ledger.sqlite")
            events = [event for _, number, _ in sorted(left) for event in plan.events(number).values()]
            spent.append(account.spent)
            under += account.spent < account.budget.spent(events) * (1 - 1e-9)
            with sqlite3.connect(home.path / "ledger.sqlite") as ledger:
                query = "SELECT round, count(*) FROM charges GROUP BY round"
                paid = dict(ledger.execute(query).fetchall())
            sent = Counter(number for _, number, _ in left)
            unpaid += sum(max(0, times - paid.get(number, 0)) for number, times in sent.items())
            charges += sum(paid.values())
    found = {"updates_lost": lost, "updates_unknown_to_silos": unknown, "releases_unpaid": unpaid, "charges": charges}
    if not plans:
        return found
    undisturbed = [event for number in range(1, rounds + 1) for event in plans[0].events(number).values()]
    return found | {
        "epsilon_undercounted": under,
        "epsilon_undisturbed": account.budget.spent(undisturbed),
        "epsilon_least": min(spent),
        "epsilon_most": max(spent),
    }


def killed_in(done: Recoveries) -> dict[str, Any]:
    """Of each kind how many were killed, and how long it took until everything was there again."""
    return {
        kind: {"times": len(seconds), "median": statistics.median(seconds), "longest": max(seconds)}
        for kind, seconds in done.items()
        if seconds
    }


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
        folder, over = Path(temporary), threading.Event()
        place = settle(folder, federation, policy, RULES)
        with running(place, lambda _: None, apart=False) as (serving, joined):
            while not all_there(place):
                time.sleep(1.0)
            killing = Killing(place, serving, joined, arguments.pause, over)
            killer = threading.Thread(target=killing.work, args=(arguments.kills, arguments.seed))
            start = time.monotonic()
            killer.start()
            run_at(place.server, config, folder / "run", lambda said: print(said, flush=True))
            over.set()
            killer.join()
        found: dict[str, Any] = {"silos": len(place.silos), "rounds": arguments.rounds, "private": arguments.private}
        found |= {"seconds": time.monotonic() - start, "killed": killed_in(killing.done)}
        plans = Experiment.of(config, federation).trainer.privacy
        found |= checked(place, folder / "run", arguments.rounds, plans)
        found["events"] = dict(Counter(row["event"] for row in read_lines(folder / "run" / "silos.jsonl")))
    print(found)
    keep(arguments.name, [found])
    kinds = ("updates_lost", "updates_unknown_to_silos", "releases_unpaid", "epsilon_undercounted")
    faults = sum(found.get(kind, 0) for kind in kinds)
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
