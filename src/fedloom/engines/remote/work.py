"""Tasks and updates as frames: declared blocks and payloads by name, each as safetensors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import fedloom
from fedloom.config import Config
from fedloom.engines.remote.frames import Frame
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.rounds import RoundContext, Site
from fedloom.settings import parse
from fedloom.sharing.codec import packed, unpacked
from fedloom.sharing.plan import BlockKey, Down, SharingPlan, Tensors
from fedloom.sharing.update import Update

TASK, UPDATE, REFUSED, FAILED = "task", "update", "refused", "failed"
RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")  # a silo names folders by it
# No weight that was learned comes near it. The bound on a gradient holds at every scale, so no promise rests on this:
# it keeps whoever sets weights away from the edge of what float32 holds.
LARGEST = 1e9
EXPERIMENTS = 3  # that stay ready at once


class RefusedError(FedloomError):
    """The silo's operator has not agreed to this, or nobody could: what was sent is no task."""


@contextmanager
def refused() -> Iterator[None]:
    """What is wrong with a task itself is told: whoever sent it knows it."""
    try:
        yield
    except FedloomError as error:
        raise RefusedError(str(error)) from error


@dataclass(frozen=True)
class Order:
    """What a silo is asked for: a round of an experiment, whole, so that nothing need be known from before."""

    run: str  # the run's own name: a silo keeps what belongs to it apart from other runs
    config: Config
    context: RoundContext
    settled: int  # the server will never go back behind this round
    version: str = fedloom.__version__
    groups: tuple[str, ...] = ()  # that were found; empty: those of the charter
    group: str = ""  # the silo's own among them; of others it is told nothing

    def frame(self, blocks: Mapping[BlockKey, bytes]) -> Frame:
        """With the packed blocks that come down, each under whose copy it is."""
        header = {
            "kind": TASK,
            "version": self.version,
            "run": self.run,
            "experiment": self.config.to_toml(),
            "round": self.context.round,
            "rounds": self.context.rounds,
            "participants": list(self.context.participants),
            "settled": self.settled,
            **({"groups": list(self.groups), "group": self.group} if self.groups else {}),
        }
        return Frame(header, {str(key): part for key, part in blocks.items()})

    @classmethod
    def of(cls, frame: Frame) -> Order:
        """Read a task's header."""
        header = frame.header
        try:
            if frame.kind != TASK:
                raise ValueError(f"kind is '{frame.kind}'")
            run = str(header["run"])
            if not RUN.fullmatch(run):
                raise ValueError(f"run = '{run}' must be small letters, digits and '-', at most 63")
            context = RoundContext(
                int(header["round"]), int(header["rounds"]), tuple(int(silo) for silo in header["participants"])
            )
            groups, group = tuple(str(name) for name in header.get("groups", ())), str(header.get("group", ""))
            config = experiment_in(str(header["experiment"]))
            return cls(run, config, context, int(header["settled"]), str(header["version"]), groups, group)
        except (KeyError, ValueError, TypeError, OverflowError, ConfigError) as error:
            raise FedloomError(f"this is no task that this version can read: {error}") from error


@lru_cache(EXPERIMENTS)
def experiment_in(text: str) -> Config:
    """The experiment that a task is of: the same text with every round, and read once."""
    return parse(Config, tomllib.loads(text))


def version_of(frame: Frame) -> str:
    """The version of fedloom that made a task; told before anything else of it is believed."""
    return str(frame.header.get("version", "unknown"))


def coming_down(plan: SharingPlan, site: Site, state: Tensors) -> dict[BlockKey, Tensors]:
    """The form of all that a task brings to a site whose model has this state: names, shapes and dtypes, no values."""
    forms = {name: tensor.to("meta") for name, tensor in state.items()}
    parts = plan.split(forms, site).items()
    return {key: part for key, part in parts if part and plan.blocks[key.block].down is not Down.NOTHING}


def received_in(frame: Frame, plan: SharingPlan, site: Site, expected: Mapping[BlockKey, Tensors]) -> Tensors:
    """What came down with a task, by parameter name in the site's model; raises unless it has the form expected."""
    _check_names("blocks", frame.parts, map(str, expected))
    blocks = {key: unpacked(frame.parts[str(key)], str(key)) for key in expected}
    for key, tensors in blocks.items():
        _check_names(f"tensors of block '{key}'", tensors, expected[key])
        for name, tensor in sorted(tensors.items()):  # whose order is left to chance
            _check_tensor(f"tensor '{name}' of block '{key}'", tensor, expected[key][name])
    return plan.join(blocks, site)


def _check_names(what: str, sent: Iterable[str], expected: Iterable[str]) -> None:
    came, due = sorted(sent), sorted(expected)
    if came != due:
        raise FedloomError(f"the server sent the {what} {came}; this experiment sends {due}")


def _check_tensor(what: str, tensor: Tensor, expected: Tensor) -> None:
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
        raise FedloomError(
            f"the server sent {what} as {tensor.dtype} of shape {tuple(tensor.shape)}, not as {expected.dtype} of "
            f"shape {tuple(expected.shape)}"
        )
    if tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (low >= -LARGEST and high <= LARGEST):  # neither holds of what is not a number
            raise FedloomError(
                f"the server sent {what} with values that are not all finite and at most {LARGEST:g} in size"
            )


def update_frame(update: Update) -> Frame:
    """An update that has passed the egress guard."""
    header = {"kind": UPDATE, "round": update.round, "counts": dict(update.counts)}
    return Frame(header, {name: packed(part) for name, part in update.parts.items()})


def update_in(frame: Frame, silo: str) -> Update:
    """The update in a silo's answer; who it is from is known from its node, not from what it says."""
    try:
        counts = {str(owner): float(count) for owner, count in frame.header["counts"].items()}
        parts = {name: unpacked(part, name) for name, part in frame.parts.items()}
        return Update(silo, int(frame.header["round"]), {}, counts).holding(parts)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise FedloomError(f"silo '{silo}' sent an update that cannot be read: {error}") from error


def refusal(reason: str) -> Frame:
    """The silo will not do this, however often it is asked."""
    return Frame({"kind": REFUSED, "reason": reason})


def failure(reason: str) -> Frame:
    """The silo could not do this; it may be asked again."""
    return Frame({"kind": FAILED, "reason": reason})
