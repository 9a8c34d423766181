"""What a run's epsilon is worth to others: a promise of silos, or a study that one machine made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fedloom.privacy.summary import PrivacySummary
from fedloom.runs.folder import RunFolder
from fedloom.runs.guarantee import guarantee_of

ONE_MACHINE = "one machine computed all silos' noise from a fast generator and nobody signed for it"
STUDY = (
    f"a simulation on data that are not public: {ONE_MACHINE}; it is a study, not a promise to the people in the data"
)


class Worth(StrEnum):
    """Who promises what."""

    NONE = "none"  # no epsilon holds
    STUDY = "study"  # simulated, on data that are not public
    SIMULATION = "simulation"  # simulated, on public data
    SIGNED = "signed"  # by every silo that took part


PROMISES = {
    Worth.STUDY: STUDY,
    Worth.SIMULATION: f"a simulation on public data: {ONE_MACHINE}",
    Worth.SIGNED: "signed by every silo that took part, with noise of its own",
}


@dataclass(frozen=True)
class Standing:
    """The guarantee of a run, and what it is worth to somebody outside."""

    worth: Worth
    summary: PrivacySummary

    @property
    def objection(self) -> str:
        """What stands against handing the run on; empty where nothing does."""
        return {Worth.NONE: self.summary.guarantee, Worth.STUDY: STUDY}.get(self.worth, "")

    @property
    def promise(self) -> str:
        """Who promises it, in words; empty where there is nothing to promise."""
        return PROMISES.get(self.worth, "")


def standing_of(folder: RunFolder) -> Standing:
    """Read it from what lies in the run's folder."""
    summary = guarantee_of(folder)
    if summary.epsilon is None:
        return Standing(Worth.NONE, summary)
    if folder.is_deployed:
        return Standing(Worth.SIGNED, summary)
    return Standing(Worth.SIMULATION if folder.data_source.public else Worth.STUDY, summary)
