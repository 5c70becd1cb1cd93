"""Widths to measure at, and lengths as people write them."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Widths of one CSA layer and of its lightning indexer; symbols as everywhere."""

    H: int
    D: int
    K: int
    Hi: int
    Di: int
    window: int = 128
    ratio: int = 4
    # Of the whole model, for what a training step should expect; None where there is no such model.
    csa_layers: int | None = None
    active_parameters: float | None = None

    @property
    def scale(self) -> float:
        return self.D**-0.5


# Active parameters a token as DeepSeek publishes them.
PRESETS = {
    "flash": Preset(H=64, D=512, K=512, Hi=64, Di=128, csa_layers=21, active_parameters=13e9),
    "pro": Preset(H=128, D=512, K=1024, Hi=64, Di=128, csa_layers=30, active_parameters=49e9),
    "small": Preset(H=8, D=64, K=32, Hi=8, Di=32, window=32),
}


def parsed_lengths(text: str) -> list[int]:
    """``"4K,16K,1000"`` to ``[4096, 16384, 1000]``; K is 1,024."""
    lengths = []
    for part in text.split(","):
        digits, factor = (part[:-1], 1024) if part[-1:] in ("K", "k") else (part, 1)
        if not digits.isdecimal() or int(digits) == 0:
            raise argparse.ArgumentTypeError(f"must be positive lengths such as 4K,16K or 1000, got {text!r}")
        lengths.append(int(digits) * factor)
    return sorted(set(lengths))


def shown_length(S: int) -> str:
    return f"{S // 1024}K" if S % 1024 == 0 else str(S)
