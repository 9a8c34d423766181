"""How many slots a compiled stack has: a program for every number of silos would be compiled once for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fedloom.engines.base import participants_of
from fedloom.engines.fused_stack import Stack

# A compiled step costs what so many silos add to it, however many there are: with convolutions, and without.
FIXED = {True: 4, False: 30}  # from benchmarks/results/gan_step-cuda.json and local_training-cuda.json


def fillable(stack: Stack) -> bool:
    """Whether its steps may work on slots without a silo: all silos take equally many, without DP-SGD.

    A silo that has taken its last one would otherwise go on at its slot while others have not.
    """
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


def cheapest_slots(rounds: Sequence[Sequence[int]], most: int, fixed: int) -> int:
    """The number of slots, at most ``most``, with which the steps of all these rounds cost least; of several the most.

    A turn costs as many silos as there are slots, and ``fixed`` ones more.
    """
    alike = Counter(tuple(counts) for counts in rounds if sum(counts))
    best, least = 1, math.inf

    def least_of(slots: int) -> int:
        """What it would cost if a run's silos need not stay together."""
        return sum(times * math.ceil(sum(counts) / slots) for counts, times in alike.items()) * (slots + fixed)

    busiest = max(map(sum, alike), default=1)
    for slots in sorted(range(min(most, busiest), 0, -1), key=least_of):
        if least_of(slots) > least:
            break
        cost = sum(times * turns(counts, slots) for counts, times in alike.items()) * (slots + fixed)
        if (cost, -slots) < (least, -best):
            best, least = slots, cost
    return best


def turns(counts: Sequence[int], slots: int) -> int:
    """In how many turns so many silos of each run train, as :meth:`FusedEngine._next_chunk` divides them."""
    number, left = 0, [count for count in counts if count]
    while len(left) > 1:
        room, rest = slots, []
        for count in left:
            taken = min(count, slots)
            if taken > room:
                taken = 0
            room -= taken
            rest += [count - taken] if count > taken else []
        number, left = number + 1, rest
    return number + math.ceil(sum(left) / slots)
