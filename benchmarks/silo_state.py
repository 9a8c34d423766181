"""Host memory of a run whose silos all keep something: encoders of their own and Adam's moments.

    python benchmarks/silo_state.py [--silos 200 2000] [--memory 32]

Each run is a process of its own: two rounds in which everybody takes part, with a bound of so many MB on what is kept
in memory (engine.state_memory), and without one. The figure is the process's peak beyond that of a run of ten silos.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

UNBOUNDED = 1e6


def run(silos: int, memory: float) -> None:
    """Live through such a run, then say how many MB this process had at most, and how many the silos keep."""
    from common import random_federation
    from fedloom import load_config, train
    from fedloom.runs.checkpoint import load_checkpoint

    settings = ("method.name=fedvae", "model.hidden=[64]", "model.latent=8", "sharing.scopes.encoder=silo")
    rest = ("local.keep_optimizer=true", "local.epochs=1", "participation.rate=1.0", "evaluation.metrics=[]")
    engine = ("engine.device=cpu", "engine.name=fused", f"engine.state_memory={memory}", "engine.keep_checkpoints=1")
    config = load_config("demo", [*settings, *rest, *engine, "rounds=2", "seed=1"])
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", random_federation(silos, 8, (1, 28, 28)))
        found = load_checkpoint(Path(folder) / "run").silos
        kept = sum(tensor.nbytes for tensor in next(iter(found.values())).values()) / 1e6
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "kept": kept * len(found)}))


def measured(silos: int, memory: float) -> dict[str, float]:
    """What a process of its own reports."""
    command = [sys.executable, __file__, "--run", str(silos), str(memory)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--memory", type=float, default=32.0)
    parser.add_argument("--run", type=float, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(int(arguments.run[0]), arguments.run[1])
        return
    from common import keep, show

    least = measured(10, UNBOUNDED)["peak"]
    rows = []
    for silos in arguments.silos:
        for memory in (arguments.memory, UNBOUNDED):
            found = measured(silos, memory)
            rows.append(
                {
                    "silos": silos,
                    "kept_MB": found["kept"],
                    "bound_MB": memory if memory < UNBOUNDED else None,
                    "peak_MB_beyond_ten_silos": found["peak"] - least,
                }
            )
    show("host memory where every silo keeps something", rows)
    keep("silo_state-cpu", rows)


if __name__ == "__main__":
    main()
