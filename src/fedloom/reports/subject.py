"""A run with its generators and its records, as far as they can be had, and whether records may be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedloom.errors import FedloomError
from fedloom.federation.records import Federation
from fedloom.methods.generator import Generator
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder


class ReportedRun(Protocol):
    """What a report asks of a run."""

    @property
    def folder(self) -> RunFolder:
        """Where it lies."""
        ...

    def generator(self) -> Generator:
        """Its newest generators."""
        ...


@dataclass(frozen=True)
class Subject:
    """A run with its generators and its records, as far as they can be had; else a sentence that says why not."""

    run: ReportedRun
    generator: Generator | None
    no_generator: str
    federation: Federation | None
    no_records: str
    is_public: bool = False  # whether everybody has the records
    with_records: bool = False  # whether somebody asked to see them nevertheless

    @property
    def shows_records(self) -> bool:
        """Whether records may stand on a page."""
        return self.is_public or self.with_records


def subject_of(run: ReportedRun, federation: Federation | str, *, with_records: bool = False) -> Subject:
    """Open what a run left; ``federation`` is what its configuration describes, or why that cannot be loaded."""
    public = _is_public(run.folder)
    generator, why = None, ""
    try:
        generator = run.generator()
        for group in generator.groups:
            generator.model(group)  # a checkpoint of another model shows here
        made_with = load_checkpoint(run.folder.path).facts.get("federation")
    except FedloomError as error:
        why = str(error)
    except Exception as error:  # a damaged checkpoint may fail anywhere in torch; the rest of the page stands
        generator, why = None, f"the checkpoint does not fit this run ({type(error).__name__}: {error})"
    if isinstance(federation, str):
        records, missing = None, f"the data cannot be loaded again: {federation}"
    elif generator is not None and made_with != federation.digest:
        records, missing = None, "the data that run.toml describes are not those it was trained on"
    else:
        records, missing = federation, ""
    return Subject(run, generator, why, records, missing, public, with_records)


def _is_public(folder: RunFolder) -> bool:
    """What cannot be read is not public."""
    try:
        return folder.data_source.public
    except (FedloomError, AttributeError, TypeError):
        return False
