"""The coefficient of the loss over the steps of a run."""

import math
from dataclasses import dataclass

DEFAULT_COEFFICIENT = 1e-2


@dataclass(frozen=True)
class CoefficientSchedule:
    """Factor on the loss by step: constant, warmed up linearly, or off.

    Raises:
        ValueError: ``coefficient`` is negative or not finite, or ``warm_up_steps`` is negative.
    """

    coefficient: float = DEFAULT_COEFFICIENT
    warm_up_steps: int = 0
    """Steps below the full coefficient: step 0 has ``1 / (warm_up_steps + 1)`` of it."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise ValueError(f"coefficient must be finite and at least 0, got {self.coefficient}")
        if self.warm_up_steps < 0:
            raise ValueError(f"warm_up_steps must be at least 0, got {self.warm_up_steps}")

    @classmethod
    def off(cls) -> "CoefficientSchedule":
        """0 at every step."""
        return cls(coefficient=0.0)

    def at(self, step: int) -> float:
        """The coefficient of one step, the first being 0.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        return self.coefficient * min(1.0, (step + 1) / (self.warm_up_steps + 1))
