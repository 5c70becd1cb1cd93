"""Launch configurations as data, by architecture and widths. Numbers without a source are estimates, to be measured.

``sm_90`` was tuned on an H200; the other entries were compiled offline and checked for spills and shared memory only.
"""

from dataclasses import dataclass
from functools import cache

import torch

from .common import block_of, dividing_block


@dataclass(frozen=True)
class RowConfig:
    """One program holds ``rows`` rows of ``width`` entries."""

    rows: int
    width: int
    num_warps: int


@dataclass(frozen=True)
class WindowConfig:
    """One program: ``queries * heads`` rows of logits against tiles of ``keys``, in steps of ``dim``."""

    queries: int
    heads: int
    keys: int
    dim: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TargetConfig:
    """One program: ``heads`` rows of logits against ``entries`` selected entries, in steps of ``dim``.

    ``held`` keeps a whole row of logits in registers: one pass. Otherwise entries are tiled and the denominator takes
    a pass of its own.
    """

    held: bool
    heads: int
    entries: int
    dim: int
    num_warps: int
    num_stages: int


@cache
def architecture(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, ...; ``cpu`` under the interpreter."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def kl_config(K: int) -> RowConfig:
    """Two warps for a row of 512, sixteen at most; short rows share a program."""
    width = block_of(K, largest=8192)
    return RowConfig(rows=max(1, 512 // width), width=width, num_warps=max(2, min(16, width // 256)))


def window_config(H: int, D: int, per_head_keys: bool, itemsize: int) -> WindowConfig:
    """With keys shared by all heads, one key tile serves every head of a query: 0.10 ms against 0.39 per head (H200).

    128 heads in one program: 0.16 ms at V4-Pro widths, twice 64 heads 0.19.
    """
    heads = 1 if per_head_keys else block_of(H, largest=128, smallest=1)
    queries = max(1, 64 // heads)
    dim = dividing_block(D, 64 if itemsize == 2 else 32)
    return WindowConfig(queries=queries, heads=heads, keys=128, dim=dim, num_warps=8 if heads > 64 else 4, num_stages=3)


# A program that holds a row takes up to 221 KB of shared memory and half the register file. sm_100 does not compile it
# (Triton 3.6 fails on the layout of accumulators of 512 rows), the other targets have less shared memory.
HOLDS_ROWS = ("sm_90", "cpu")


def target_config(architecture: str, H: int, K: int, D: int, itemsize: int, joint: bool) -> TargetConfig:
    """Hold the row where it fits: at V4-Flash widths 0.47 ms on an H200, two passes over tiles 0.60."""
    dim = dividing_block(D, 64 if itemsize == 2 else 32)
    if not joint and K <= 512 and itemsize == 2 and architecture in HOLDS_ROWS:
        entries = block_of(K, largest=512)
        heads = block_of(H, largest=64)
        return TargetConfig(True, heads, entries, dim, num_warps=8 if entries > 256 else 4, num_stages=3)
    # A gathered entry that serves 128 heads at once: 0.73 ms a pass at V4-Pro widths, twice 64 heads 0.92.
    heads = block_of(H, largest=128 if itemsize == 2 else 64)
    entries = block_of(K, largest=64 if heads > 64 else 128)  # [128, 128] spills at 4 warps and is slower at 8
    return TargetConfig(False, heads, entries, dim, num_warps=4, num_stages=3)
