"""Decode steps as captured graphs: one replay in place of some hundred kernel launches.

A graph computes over the tensors that it was captured with. So for each of a few sizes there is one set of step tensors; a
decode step is padded to the next size (its padding rows write to the scratch block), its numbers are copied into that set, and
the graph of that size is replayed. What is no decode step, or larger than the largest size, runs without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from workers.engine.attention.metadata import is_decode, pad_decode, size_for
from workers.engine.attention.paged import PagedAttention
from workers.engine.attention.step_tensors import StepTensors, refill, steady
from workers.engine.batch import Batch
from workers.engine.model.llama import Llama, Rows, Workspace

log = structlog.get_logger()

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Capture(Protocol):
    """Records work on the device; the work may run once or more meanwhile."""

    def __call__(self, work: Callable[[], Rows]) -> tuple[Rows, Callable[[], None]]:
        """The recorded work's result, and what replays the work: it leaves its result in the same tensors."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    """One size: tensors that are filled before replay() and read after it. work is kept because the graph has its addresses."""

    step: StepTensors
    rows: Rows
    work: Workspace
    replay: Callable[[], None]


class DecodeGraphs:
    """forward() is the model's, with graphs where they fit. table_width: blocks of the longest sequence that may be."""

    def __init__(
        self,
        model: Llama,
        attention: PagedAttention,
        table_width: int,
        block_tokens: int,
        device: torch.device,
        capture: Capture,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        self._model = model
        self._attention = attention
        self._table_width = table_width
        self._block_tokens = block_tokens
        self._device = device
        self._capture = capture
        self._sizes = sizes
        self._captured: dict[int, _Captured] = {}

    def capture_all(self) -> None:
        """Captures the largest size first, so that the smaller ones fit into its memory."""
        nothing = _no_rows()
        for size in reversed(self._sizes):
            self._captured[size] = self._capture_size(self._padded(nothing, size))
        log.info("graphs", sizes=list(self._sizes))

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As Llama.forward()."""
        size = size_for(batch.rows, self._sizes) if is_decode(batch) else None
        held = self._captured.get(size) if size is not None else None
        if size is None or held is None:
            return self._model.forward(batch)
        refill(held.step, self._padded(batch, size))
        self._attention.take(held.step)
        held.replay()
        return self._model.logits(held.rows, batch.sampled_rows)

    def _padded(self, batch: Batch, size: int) -> Batch:
        return pad_decode(batch, size, self._attention.scratch_block, self._table_width, self._block_tokens)

    def _capture_size(self, batch: Batch) -> _Captured:
        step = steady(batch, self._table_width * self._block_tokens, self._device)
        self._attention.take(step)
        rows, replay = self._capture(lambda: self._model.layers(batch))
        return _Captured(step, rows, self._model.workspace_for(batch.rows), replay)


def _no_rows() -> Batch:
    """Nothing but padding once it is padded."""
    none, tables = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    return Batch(none, none, none, none, np.zeros(1, np.int64), tables, none)


def cuda_capture() -> Capture:
    """CUDA graphs that share one pool of memory: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Rows]) -> tuple[Rows, Callable[[], None]]:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries make their workspaces on first use, which cannot be captured
            work()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            rows = work()
        return rows, graph.replay

    return capture
