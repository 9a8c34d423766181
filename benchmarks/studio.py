"""The studio: how fast images follow in the latent explorer, and how soon many runs stand on the page.

As a client on the same machine sees it: python benchmarks/studio.py [--frames 300] [--runs 500]
"""

from __future__ import annotations

import argparse
import http.client
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from common import MODELS, keep, random_federation, show
from fedloom.config import load_config
from fedloom.experiment import Experiment
from fedloom.studio.server import Listener, server_of
from fedloom.studio.studio import Studio

CONVOLUTIONS = ("model.network=conv", "model.channels=[32, 64, 128, 256]", "model.latent=120")
DECODERS = {
    "MLP, 2 latents": ((1, 28, 28), ("model.latent=2", "model.hidden=[512, 256]")),
    "MLP, 40 latents": MODELS["mlp"],
    "convolutions of CHARM, 120 latents": ((3, 32, 32), (*CONVOLUTIONS, "model.likelihood=gaussian")),
}
QUICK = ("rounds=1", "method.name=fedvae", "evaluation.metrics=[]", "engine.workers=1", "engine.threads=1")
AIM = 100.0  # milliseconds a frame
AIM_OF_LIST = 1000.0  # milliseconds until all runs stand on the page
ROUNDS = 20  # of each run in the list, with samples and metrics of every other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--runs", type=int, default=500)
    given = parser.parse_args()
    frames = given.frames
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number, (shape, settings) in enumerate(DECODERS.values()):
            config = load_config("demo", [*QUICK, *settings])
            Experiment.of(config, random_federation(2, 32, shape)).run(root / str(number))
        with serving(root) as (studio, ask):
            keys = {entry.name: entry.key for entry in studio.catalogue.entries().values()}
            rows = [measured(name, ask, keys[str(number)], frames) for number, name in enumerate(DECODERS)]
    show("frames of the latent explorer, in milliseconds", rows)
    listed = [list_of_runs(given.runs)]
    show("the page of all runs, in milliseconds", listed)
    keep("studio-cpu", rows, aim_ms=AIM, frames=frames, list=listed, aim_of_list_ms=AIM_OF_LIST)


@contextmanager
def serving(root: Path) -> Iterator[tuple[Studio, Callable[[str], float]]]:
    """A studio, and what it takes to ask it: milliseconds."""
    place, studio = Listener.of("127.0.0.1", 0, ""), Studio.over(root, root / "papers")
    server = server_of(studio, place.door)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place.listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    connection = http.client.HTTPConnection("127.0.0.1", place.listener.getsockname()[1])

    def ask(address: str) -> float:
        start = time.perf_counter()
        connection.request("GET", address)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return 1000 * (time.perf_counter() - start)

    try:
        yield studio, ask
    finally:
        connection.close()
        server.handle_exit(2, None)
        thread.join()
        place.listener.close()


def list_of_runs(count: int) -> dict[str, Any]:
    """Copies of one run with seeds of their own, asked for by a studio that knows none of them, and then again."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        settings = ("seed=0", f"rounds={ROUNDS}", "evaluation.every=2", "evaluation.metrics=['spread']")
        config = load_config("demo", [*QUICK, *settings])
        Experiment.of(config, random_federation(2, 32, (1, 28, 28))).run(root / "0")
        text = (root / "0" / "run.toml").read_text(encoding="utf-8")
        for number in range(1, count):
            copy = Path(shutil.copytree(root / "0", root / str(number), ignore=shutil.ignore_patterns("checkpoints")))
            (copy / "run.toml").write_text(text.replace("seed = 0", f"seed = {number}", 1), encoding="utf-8")
        with serving(root) as (studio, ask):
            before, first = time.process_time(), ask("/")
            cpu = 1000 * (time.process_time() - before)
            time.sleep(2 * studio.watch.tick)
            return {"runs": count, "first_ms": first, "first_cpu_ms": cpu, "again_ms": ask("/")}


def measured(name: str, ask: Callable[[str], float], key: str, frames: int) -> dict[str, Any]:
    """Times of a walk around the mean."""
    base = f"/runs/{key}/1"
    first = ask(f"{base}/start")
    directions = 2 if name.endswith(" 2 latents") else 8

    def values(step: int) -> str:
        angle = 2 * math.pi * step / frames
        places = [2 * math.cos(angle), 2 * math.sin(angle), *(0.1 * i for i in range(directions - 2))]
        return ",".join(f"{place:.3f}" for place in places)

    ask(f"{base}/frame?values={values(0)}")
    walk = [ask(f"{base}/frame?values={values(step)}") for step in range(frames)]
    return {
        "decoder": name,
        "frame_median_ms": quantiles(walk, n=100)[49],
        "frame_95_percent_ms": quantiles(walk, n=100)[94],
        "frame_slowest_ms": max(walk),
        "atlas_of_121_ms": min(ask(f"{base}/atlas?values={values(0)}") for _ in range(3)),
        "first_main_directions_ms": first,
    }


if __name__ == "__main__":
    main()
