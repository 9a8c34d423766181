"""What the studio knows: runs with their numbers and generators, read when asked for and kept while they hold."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment import load
from fedloom.reports.facts import facts_of
from fedloom.reports.findings import findings
from fedloom.reports.parts import Story
from fedloom.reports.pictures import Samples, grids_of, sample_files
from fedloom.reports.subject import subject_of
from fedloom.runs.checkpoint import checkpoint_rounds, folder_of
from fedloom.studio.catalogue import Catalogue, FoundRun, NotServedError, check, is_plain
from fedloom.studio.explorer import Explorer
from fedloom.studio.pages import MOST_COMPARED
from fedloom.studio.records import RealPictures, real_pictures
from fedloom.studio.run_summary import address_of_samples
from fedloom.studio.watch import LiveRun, RunWatch
from fedloom.studio.workbench import Workbench

KEPT = 16  # runs whose numbers, and as many whose models, stay in memory
NO_RECORDS = "the studio reads nothing but the runs folder"
Made = TypeVar("Made")


@dataclass
class MadeOnce:
    """What was made last, for those who ask again; made once, however many ask at a time."""

    _made: OrderedDict[str, tuple[Hashable, Any]] = field(default_factory=OrderedDict)
    _making: weakref.WeakValueDictionary[str, threading.Lock] = field(default_factory=weakref.WeakValueDictionary)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str, version: Hashable, make: Callable[[], Made]) -> Made:
        """What stands under a name, if it is of this version; else it is made."""
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())  # gone with the last who holds it
        with making:
            with self._lock:
                found = self._made.get(name)
            if found is None or found[0] != version:
                found = version, make()
            with self._lock:
                self._made[name] = found
                self._made.move_to_end(name)
                if len(self._made) > KEPT:
                    self._made.popitem(last=False)
            made: Made = found[1]
            return made


@dataclass
class Studio:
    """A runs folder."""

    catalogue: Catalogue
    watch: RunWatch
    papers: Path  # where result files of papers' tables lie, if anywhere
    workbench: Workbench | None = None  # where runs may be begun and stopped
    with_records: bool = False  # whether records that are not known as public may stand beside samples
    _stories: MadeOnce = field(default_factory=MadeOnce)
    _explorers: MadeOnce = field(default_factory=MadeOnce)
    _records: MadeOnce = field(default_factory=MadeOnce)

    @classmethod
    def over(cls, root: Path, papers: Path, works: bool = False, with_records: bool = False) -> Studio:
        """The studio of a folder, where wanted with a workbench, and with records."""
        catalogue = Catalogue(root.resolve())
        return cls(catalogue, RunWatch(catalogue), papers, Workbench(catalogue) if works else None, with_records)

    def live_run(self, key: str) -> LiveRun:
        """A run that can be read."""
        live_run = self.watch.live_run(self.catalogue.entry(key))
        if live_run.summary.problem:
            raise NotServedError(live_run.summary.problem)
        return live_run

    def story(self, live_run: LiveRun) -> Story:
        """What a run's page tells."""
        entry = live_run.summary.entry
        return self._stories.get(entry.key, live_run.summary.stamp, lambda: self._story(entry))

    def real_pictures(self, entry: FoundRun) -> RealPictures:
        """Held-out records of a run: loaded once, however long the run goes on."""
        check(entry)
        run = load(entry.path)
        config = run.folder.config
        version = config.data, config.audit, config.seed, run.folder.rounds_done > 0
        return self._records.get(entry.key, version, lambda: real_pictures(run, self.with_records))

    def real_picture(self, key: str, place: int) -> tuple[str, bytes]:
        """One of its grids."""
        grids = [*self.real_pictures(self.live_run(key).summary.entry).grids.values()]
        if not 0 <= place < len(grids):
            raise NotServedError("there is no such picture of records")
        return grids[place]

    def compared(self, keys: Sequence[str]) -> tuple[list[LiveRun], list[Story]]:
        """Chosen runs, and what there is to tell about each."""
        chosen = list(dict.fromkeys(keys))
        if not 2 <= len(chosen) <= MOST_COMPARED:
            raise ConfigError(f"choose 2 to {MOST_COMPARED} runs to compare, not {len(chosen)}")
        live_runs = [self.live_run(key) for key in chosen]
        return live_runs, [self.story(live_run) for live_run in live_runs]

    def sample_file(self, key: str, round_number: int, place: int) -> Path:
        """A grid of samples, by its place among those of its round."""
        files = grids_of(self.live_run(key).summary.entry.path).get(round_number, [])
        if not 0 <= place < len(files) or not is_plain(files[place]):
            raise NotServedError(f"there is no such picture of round {round_number}")
        return files[place]

    def explorer(self, key: str, round_number: int | None = None) -> Explorer:
        """The generators of a round, by default the newest."""
        entry = self.catalogue.entry(key)
        run = load(entry.path)
        wanted = run.folder.rounds_done if round_number is None else round_number
        if round_number is not None and round_number not in checkpoint_rounds(entry.path):
            raise NotServedError(f"run '{entry.name}' has no checkpoint of round {round_number}")

        def make() -> Explorer:
            check(entry)
            try:
                return Explorer(run.generator(wanted or None), wanted)
            except FedloomError:
                raise
            except Exception as error:  # a damaged checkpoint may fail anywhere in torch
                raise NotServedError(f"the checkpoint does not fit this run ({type(error).__name__})") from error

        index = folder_of(entry.path, wanted) / "index.json"
        version = index.lstat().st_mtime_ns if index.exists() else 0
        return self._explorers.get(f"{entry.key}/{wanted}", version, make)

    def _story(self, entry: FoundRun) -> Story:
        check(entry)
        real = self.real_pictures(entry)
        addresses = {group: f"/runs/{entry.key}/records/{place}" for place, group in enumerate(real.grids)}
        return replace(_told(entry), real=addresses, no_real=real.missing)


def _told(entry: FoundRun) -> Story:
    subject = replace(subject_of(load(entry.path), NO_RECORDS), no_records=NO_RECORDS)
    facts = facts_of(subject, entry.name)
    grids = grids_of(entry.path)
    films = {
        group: {n: address_of_samples(entry, n, grids[n].index(file), file) for n, file in film.items()}
        for group, film in sample_files(entry.path, facts.groups).items()
    }
    return Story(facts, findings(facts), Samples(films, ()), {})
