"""``fedloom run --dry-run``: what a run would take."""

from __future__ import annotations

from dataclasses import asdict

from fedloom.cli.output import clock, plural, say, say_facts, show_json, size, terminal
from fedloom.config import Config


def estimate(config: Config, as_json: bool) -> None:
    """Print how long a run would take, and how much memory, without beginning it."""
    with terminal().status("trying some steps"):
        from fedloom.experiment import estimate as estimated

        found = estimated(config)
    if as_json:
        show_json({**asdict(found), "seconds": found.seconds})
        return
    say(f"{config.method.name} would take about {clock(found.seconds)}, and nothing was written")
    each = f"{found.seconds_per_round:.2g} s each" if found.seconds_per_round < 60 else clock(found.seconds_per_round)
    say_facts(
        {
            "data": f"{plural(found.silos, 'silo')}, {plural(found.records, 'record')}",
            "rounds": f"{found.rounds:,}, {each}; {plural(found.steps_per_round, 'step')} a round",
            "model": f"{plural(found.parameters, 'parameter')}; {size(found.bytes_per_checkpoint)} a checkpoint",
            "memory": f"{size(found.memory)} at most while it was tried" if found.memory else "not known",
            "engine": found.engine,
            "found by": f"{plural(found.tried_steps, 'step')} in three rounds; metrics and samples come on top",
        }
    )
