"""Held-out records to stand beside samples: of sources that everybody has, and of own data where somebody asked.

A run's settings are the words of whoever made its folder: what they say of a path, and of who has the records, opens
no file unless the studio was started with records, which it is on this machine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedloom.federation.sources import is_public
from fedloom.reports.pictures import encoded
from fedloom.reports.record_panels import real_records
from fedloom.reports.report import federation_or_why
from fedloom.reports.subject import ReportedRun, subject_of

FLAG = "--with-records"
AT_SILOS = "Records stay at their silos, so that none stand beside these samples."
NOT_PUBLIC = f"Records are not public as far as is known; 'fedloom studio {FLAG}' shows held-out ones beside samples."


@dataclass(frozen=True)
class RealPictures:
    """A grid of held-out records of each group, as media type and content; else a sentence that says why not."""

    grids: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    missing: str = ""


def why_hidden(run: ReportedRun, with_records: bool) -> str:
    """Why a run's records are not to be shown; empty where they may be."""
    if run.folder.is_deployed:
        return AT_SILOS
    known_to_all = is_public(replace(run.folder.config.data, public=False))
    return "" if known_to_all or with_records else NOT_PUBLIC


def real_pictures(run: ReportedRun, with_records: bool) -> RealPictures:
    """Load a run's records and draw some; whatever is wrong with them becomes a sentence."""
    try:
        if hidden := why_hidden(run, with_records):
            return RealPictures(missing=hidden)
        config = run.folder.config
        federation = federation_or_why(config.data, config.audit, config.seed)
        subject = subject_of(run, federation, with_records=True)
        grids = {group: encoded(image) for group, image in real_records(subject).items()}
    except Exception as error:  # a run's files, and those of own data, may be damaged in any way
        return RealPictures(missing=f"Records cannot be shown ({type(error).__name__}: {error}).")
    return RealPictures(grids, f"Records are not shown: {subject.no_records}." if subject.no_records else "")
