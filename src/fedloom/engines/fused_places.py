"""How many places a compiled stack has: a program for every number of silos would be compiled once for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedloom.engines.base import participants_of
from fedloom.engines.fused_stack import Stack

FIXED = 4  # a compiled step costs what so many silos add to it, however many there are: see docs/engines.md


def alike(stack: Stack) -> bool:
    """Whether its silos take as many steps: one that has ended would go on at its place while others have not."""
    return stack.kind.privacy is None and len({member.steps for member in stack.members}) == 1


def attendance(stack: Stack) -> list[list[int]]:
    """For each round how many silos of the stack take part, run by run: a public draw, so it is known ahead."""
    members = {member.run: member.trainer for member in stack.members}
    own = {run: {member.index for member in stack.members if member.run == run} for run in members}
    return [
        [
            len(own[run].intersection(participants_of(trainer.config, trainer.federation, round)))
            for run, trainer in members.items()
        ]
        for round in range(1, stack.kind.rounds + 1)
    ]


def fewest_places(rounds: Sequence[Sequence[int]], most: int) -> int:
    """The number of places, at most ``most``, with which the steps of all these rounds cost least."""
    busiest = max((sum(counts) for counts in rounds), default=0)

    def cost(places: int) -> int:
        return sum(chunks(counts, places) for counts in rounds) * (places + FIXED)

    return min(range(1, max(1, min(most, busiest)) + 1), key=lambda places: (cost(places), -places))


def chunks(counts: Sequence[int], places: int) -> int:
    """In how many turns so many silos of each run train, as :meth:`FusedEngine._next_chunk` divides them."""
    number, left = 0, [count for count in counts if count]
    while len(left) > 1:
        room, rest = places, []
        for count in left:
            taken = min(count, places)
            if taken > room:
                taken = 0
            room -= taken
            rest += [count - taken] if count > taken else []
        number, left = number + 1, rest
    return number + math.ceil(sum(left) / places)
