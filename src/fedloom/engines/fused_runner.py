"""How the steps of a window are carried out: one by one, or recorded as a CUDA graph and played back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedloom.engines.batches import Window
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_step import Precision, matrix_precision
from fedloom.errors import FedloomWarning

WARM_UP = 2  # steps before a recording, in which libraries take their memory


class Runner(Protocol):
    """Runs the steps of a program."""

    def prepare(self, counts: list[int], round: int) -> None:
        """Get ready for steps of so many silos at once; may run steps, so weights must be loaded afterwards."""
        ...

    def run(self, window: Window) -> None:
        """All steps of a window."""
        ...


class PlainRunner:
    """Runs a window's steps one after the other, each launched from Python."""

    def __init__(self, program: StackProgram, precision: Precision) -> None:
        self._program, self._precision = program, precision

    def prepare(self, counts: list[int], round: int) -> None:
        """Nothing need be recorded."""

    def run(self, window: Window) -> None:
        """All steps of a window."""
        with matrix_precision(self._precision):
            for step in range(len(window)):
                self._program.draw(window.silos)
                self._program.step(window.step(step))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection: what it frees may own memory of the device, and to free that would spoil a recording."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Recording(Protocol):
    """A step that can be played back."""

    def replay(self) -> None:
        """Once more, with what lies in the buffers now."""
        ...


class Recorder(Protocol):
    """Makes a recording of a step, such as a CUDA graph."""

    def __call__(self, warm_up: Callable[[], None], step: Callable[[], None], beside: Any) -> Recording:
        """Record ``step`` after ``warm_up``; it may share memory with an earlier recording, ``beside``."""
        ...


class GraphRecorder:
    """Records steps as CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(
        self, warm_up: Callable[[], None], step: Callable[[], None], beside: torch.cuda.CUDAGraph | None
    ) -> torch.cuda.CUDAGraph:
        """Record on a stream of its own."""
        graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.pool()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                warm_up()
            self._stream.synchronize()
            with _undisturbed(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph


class GraphRunner:
    """One recording for each number of silos, all over the same buffers; a counter on the device says which step.

    If ``filled``, a single one of all slots: those without a silo compute what nobody looks at.

    Playing a graph back costs no Python and no launches, which is most of what a small model's step would cost.
    """

    def __init__(
        self, program: StackProgram, precision: Precision, steps: int, record: Recorder, filled: bool = False
    ) -> None:
        self._program, self._precision, self._record, self._filled = program, precision, record, filled
        self._round, self._training = 0, program.training
        device = next(iter(program.weights.values())).device
        self._buffers = program.buffers(steps)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._recordings: dict[int, Recording] = {}
        self._records = True  # until it fails

    def prepare(self, counts: list[int], round: int) -> None:
        """Record what is missing; an objective that looks at the round must be recorded anew in each.

        So must a step of which other phases are a part from now on.
        """
        now, before = (round, self._program.training), (self._round, self._training)
        if (self._program.reads_context and now != before) or now[1] != before[1]:
            self._recordings.clear()
        self._round, self._training = now
        try:
            for silos in dict.fromkeys(self._recorded_silos(count) for count in counts):
                if self._records and silos not in self._recordings:
                    self._recordings[silos] = self._recorded(silos)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the driver, or of a library that cannot be recorded
            self._records = False
            self._recordings.clear()
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"a step could not be recorded ({reason}): going on with steps one by one, which is slower",
                FedloomWarning,
                stacklevel=2,
            )

    def run(self, window: Window) -> None:
        """Fill the buffers and play back; what is too rare to be recorded, or cannot be, goes step by step."""
        if not window.usual or not (self._records or self._filled):
            PlainRunner(self._program, self._precision).run(window)
            return
        steps, silos = len(window), window.silos
        for ours, theirs in zip(tree_leaves(self._buffers), tree_leaves(window.inputs), strict=True):
            ours[:steps, :silos] = theirs
        self._counter.zero_()
        step = self._step_of(self._recorded_silos(silos))
        for _ in range(steps):
            self._program.draw(silos)
            step()

    def _step_of(self, silos: int) -> Callable[[], None]:
        """A recording, or where there can be none the step itself, of as many silos: it was compiled for those."""
        if self._records:
            return self._recordings[silos].replay

        def step() -> None:
            with matrix_precision(self._precision):
                self._step(silos)

        return step

    def _recorded_silos(self, silos: int) -> int:
        return self._program.size if self._filled else silos

    def _recorded(self, silos: int) -> Recording:
        def warm_up() -> None:
            self._step(silos)
            self._counter.zero_()

        self._counter.zero_()  # playing back has left it at the end of the buffers
        with matrix_precision(self._precision):
            return self._record(warm_up, lambda: self._step(silos), next(iter(self._recordings.values()), None))

    def _step(self, silos: int) -> None:
        # Which step it is stands on the device and is counted there: a recording repeats any number that Python gave.
        def now(tensor: Tensor) -> Tensor:
            return tensor[:, :silos].index_select(0, self._counter).squeeze(0)

        self._program.step(tree_map(now, self._buffers))
        self._counter += 1
