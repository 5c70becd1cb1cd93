"""How a cost grows with the length, and what a training step should expect of it."""

import math
from collections.abc import Sequence

from .ceilings import Ceilings
from .presets import Preset


def fitted_exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """``b`` of ``cost = a * S**b``: least squares on the logarithms; at least two lengths, costs above 0."""
    x, y = [math.log(S) for S in lengths], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def growth(measurements: list[dict]) -> list[dict]:
    """Exponents of time and extra memory, forward and backward together, for every rung with two lengths or more."""
    curves: dict[tuple[str, str], list[dict]] = {}
    for measured in measurements:
        if measured["direction"] == "both":
            curves.setdefault((measured["part"], measured["rung"]), []).append(measured)
    return [
        {
            "part": part,
            "rung": rung,
            "lengths": [point["length"] for point in curve],
            "time_exponent": fitted_exponent(
                [point["length"] for point in curve], [point["median_ms"] for point in curve]
            ),
            "memory_exponent": _memory_exponent(curve),
        }
        for (part, rung), curve in curves.items()
        if len(curve) > 1
    ]


def _memory_exponent(curve: list[dict]) -> float | None:
    points = [(point["length"], point["extra_bytes"]) for point in curve if point["extra_bytes"]]
    return fitted_exponent(*zip(*points, strict=True)) if len(points) > 1 else None


def training_step(preset: Preset, measurements: list[dict], ceilings: Ceilings) -> list[dict]:
    """Computed, not measured: all CSA layers' indexer and loss in a step over one sequence of each length.

    The share is of the time that ``6 * active parameters * tokens`` operations take at the measured matrix ceiling. A
    real step takes longer, so the share is an upper bound.
    """
    if preset.csa_layers is None:
        return []
    steps = []
    for measured in measurements:
        if measured["part"] == "together" and measured["direction"] == "both":
            step_ms = 6 * preset.active_parameters * measured["length"] / ceilings.matrix_tflops / 1e9
            milliseconds = preset.csa_layers * measured["median_ms"]
            steps.append(
                {
                    "length": measured["length"],
                    "rung": measured["rung"],
                    "csa_layers": preset.csa_layers,
                    "milliseconds": milliseconds,
                    "step_at_ceiling_ms": step_ms,
                    "share_at_most": milliseconds / step_ms,
                }
            )
    return steps
