"""Medians of repeated calls, and their peak memory.

On a GPU every repetition starts with a flushed L2 and is bracketed by events, as in ``triton.testing.do_bench``. A
fused call costs 5 to 500 us, less than Python needs to launch it, so it is recorded once as a CUDA graph and replayed;
unfused calls are launched from Python each time, as their users do, behind the flush that still occupies the device.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .work import bytes_of

# Larger than the L2 of any GPU so far.
FLUSHED_BYTES = 256 * 2**20
WARM_UP_CALLS = 3
LEAST_REPETITIONS, MOST_REPETITIONS = 5, 200
# Of repetitions in each of a rung's three directions, what goes before each call included.
GPU_SECONDS, CPU_SECONDS = 0.4, 0.05


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, the quartiles, and the 5th and 95th percentile."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float
    repetitions: int
    method: str

    @classmethod
    def of(cls, milliseconds: list[float], method: str) -> "Timing":
        fractions = torch.tensor([0.5, 0.25, 0.75, 0.05, 0.95], dtype=torch.float64)
        quantiles = torch.tensor(milliseconds, dtype=torch.float64).quantile(fractions)
        return cls(*quantiles.tolist(), repetitions=len(milliseconds), method=method)


def _repetitions(seconds: float, seconds_each: float) -> int:
    return max(LEAST_REPETITIONS, min(MOST_REPETITIONS, int(seconds / max(seconds_each, 1e-6))))


class CpuClock:
    """Wall-clock time, caches as they are."""

    def running(self) -> AbstractContextManager:
        """Everything that is measured is prepared and run within."""
        return nullcontext()

    def measure(self, prepare: Callable[[], Any], call: Callable[[Any], Any], as_graph: bool) -> Timing:
        """Time ``call(prepare())``, without ``prepare``."""
        self._once(prepare, call)
        start = time.perf_counter()
        self._once(prepare, call)
        repetitions = _repetitions(CPU_SECONDS, time.perf_counter() - start)
        milliseconds = [self._once(prepare, call) for _ in range(repetitions)]
        return Timing.of(milliseconds, "wall clock")

    def _once(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> float:
        state = prepare()
        start = time.perf_counter()
        call(state)
        return 1000 * (time.perf_counter() - start)

    def extra_bytes(self, call: Callable[[], tuple[Tensor, ...]]) -> int | None:
        """Not measured on a CPU."""
        return None


class GpuClock:
    """CUDA events on a stream of its own, since graphs are not captured on the default one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)

    def running(self) -> AbstractContextManager:
        """Everything that is measured is prepared and run within."""
        return torch.cuda.stream(self._stream)

    def measure(self, prepare: Callable[[], Any], call: Callable[[Any], Any], as_graph: bool) -> Timing:
        """Time ``call(prepare())``, without ``prepare``."""
        for _ in range(WARM_UP_CALLS):
            call(prepare())
        torch.cuda.synchronize(self._device)
        if not as_graph:
            return Timing.of(self._repeat(prepare, call), "launched")
        state = prepare()  # lives as long as the graph, which reads it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            call(state)
        return Timing.of(self._repeat(lambda: None, lambda _: graph.replay()), "graph")

    def _repeat(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> list[float]:
        start = time.perf_counter()
        self._times(prepare, call, LEAST_REPETITIONS)
        each = (time.perf_counter() - start) / LEAST_REPETITIONS
        return self._times(prepare, call, _repetitions(GPU_SECONDS, each))

    def _times(self, prepare: Callable[[], Any], call: Callable[[Any], Any], repetitions: int) -> list[float]:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions)]
        stops = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions)]
        for start, stop in zip(starts, stops, strict=True):
            state = prepare()
            self._flushed.zero_()
            start.record()
            call(state)
            stop.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]

    def extra_bytes(self, call: Callable[[], tuple[Tensor, ...]]) -> int:
        """Peak of ``call`` beyond what was held before it and the tensors that it returns."""
        call()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        returned = call()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return max(0, peak - before - bytes_of(*returned))


def clock_of(device: torch.device) -> CpuClock | GpuClock:
    return GpuClock(device) if device.type == "cuda" else CpuClock()
