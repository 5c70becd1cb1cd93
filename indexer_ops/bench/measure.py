"""One rung at one length: time in each direction, speed against the ceilings, extra memory."""

from collections.abc import Callable
from typing import Any

import torch

from .ceilings import Ceilings
from .inputs import Case
from .ladder import DIRECTIONS, Rung, gradients
from .timing import CpuClock, GpuClock, Timing
from .work import compulsory_bytes, extra_bytes_bound, floating_point_operations


def _steps(rung: Rung, case: Case, backend: str, as_graph: bool) -> dict[str, tuple[Callable, Callable]]:
    """For each direction what goes before the timed call, and the call."""

    def forward(_: Any = None) -> tuple[torch.Tensor, ...]:
        return rung.forward(case, backend)

    def backward(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # A graph replays the backward of one forward, whose saved tensors must stay.
        return gradients(rung, case, outputs, retain_graph=as_graph)

    def both(_: Any = None) -> tuple[torch.Tensor, ...]:
        outputs = forward()
        return (*(output.detach() for output in outputs), *gradients(rung, case, outputs))

    def nothing() -> None:
        return None

    return {"forward": (nothing, forward), "backward": (forward, backward), "both": (nothing, both)}


def measure(rung: Rung, case: Case, backend: str, clock: CpuClock | GpuClock, ceilings: Ceilings) -> list[dict]:
    """One entry per direction, without the speed-up, which takes another rung."""
    as_graph = rung.fused and case.query.is_cuda
    steps = _steps(rung, case, backend, as_graph)
    measured = []
    for direction in DIRECTIONS:
        prepare, call = steps[direction]
        timing = clock.measure(prepare, call, as_graph)
        extra_bytes = clock.extra_bytes(call) if direction == "both" else None
        measured.append(_entry(rung, case, direction, timing, extra_bytes, ceilings))
    return measured


def _entry(
    rung: Rung, case: Case, direction: str, timing: Timing, extra_bytes: int | None, ceilings: Ceilings
) -> dict[str, Any]:
    operations = floating_point_operations(rung, case, direction)
    tflops = operations / timing.median / 1e9
    terabytes_per_second = compulsory_bytes(rung, case, direction) / timing.median / 1e9
    return {
        "length": case.S,
        "part": rung.part,
        "rung": rung.name,
        "fused": rung.fused,
        "direction": direction,
        "median_ms": timing.median,
        "lower_quartile_ms": timing.lower_quartile,
        "upper_quartile_ms": timing.upper_quartile,
        "low_ms": timing.low,
        "high_ms": timing.high,
        "repetitions": timing.repetitions,
        "method": timing.method,
        "operations": operations,
        "tflops": tflops,
        "share_of_matrix_ceiling": tflops / ceilings.matrix_tflops,
        "share_of_copy_bandwidth": terabytes_per_second / ceilings.copy_terabytes_per_second,
        "extra_bytes": extra_bytes,
        "extra_bytes_bound": extra_bytes_bound(rung, case) if direction == "both" else None,
    }


def with_speed_ups(measurements: list[dict]) -> list[dict]:
    """Each with ``speed_up`` over eager in the same part, direction and length; None where that was skipped."""
    eager = {
        (measured["length"], measured["part"], measured["direction"]): measured["median_ms"]
        for measured in measurements
        if measured["rung"] == "eager"
    }

    def speed_up(measured: dict) -> float | None:
        slow = eager.get((measured["length"], measured["part"], measured["direction"]))
        return None if slow is None else slow / measured["median_ms"]

    return [{**measured, "speed_up": speed_up(measured)} for measured in measurements]
