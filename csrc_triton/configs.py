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
class TileConfig:
    """One program: the logits of ``heads`` of a query against ``entries`` selected entries, in steps of ``dim``."""

    heads: int
    entries: int
    dim: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TargetConfig:
    """Either ``held``: a program keeps a whole row of logits in registers, one pass.

    Or ``target``, and before it ``lse`` where the denominator is not given: entries are tiled, and the denominator
    takes a pass of its own.
    """

    held: TileConfig | None = None
    lse: TileConfig | None = None
    target: TileConfig | None = None


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

    128 heads in one program: 0.22 ms at V4-Pro widths, twice 64 heads 0.26.
    """
    heads = 1 if per_head_keys else block_of(H, largest=128, smallest=1)
    queries = max(1, 64 // heads)
    dim = dividing_block(D, 64 if itemsize == 2 else 32)
    return WindowConfig(queries=queries, heads=heads, keys=128, dim=dim, num_warps=8 if heads > 64 else 4, num_stages=3)


# A program that holds a row takes up to 221 KB of shared memory and half the register file. sm_100 does not compile it
# (Triton 3.6 fails on the layout of accumulators of 512 rows), the other targets have less shared memory.
HOLDS_ROWS = ("sm_90", "cpu")


def target_config(architecture: str, H: int, K: int, D: int, itemsize: int, joint: bool) -> TargetConfig:
    """Hold the row where it fits: at V4-Flash widths 0.47 ms on an H200, two passes over tiles 0.68."""
    dim = dividing_block(D, 64 if itemsize == 2 else 32)
    if not joint and K <= 512 and itemsize == 2 and architecture in HOLDS_ROWS:
        entries = block_of(K, largest=512)
        num_warps = 8 if entries > 256 else 4
        return TargetConfig(held=TileConfig(block_of(H, largest=64), entries, dim, num_warps, num_stages=3))
    entries = block_of(K, largest=128)
    if H > 64 and itemsize == 2:
        # A gathered entry serves 128 heads at once: 0.69 and 0.65 ms at V4-Pro widths (H200), twice 64 heads 0.88 each.
        # Shared memory of gfx942 takes two stages of this and no more.
        lse = TileConfig(128, entries, dim, num_warps=8, num_stages=3 if architecture.startswith("sm") else 2)
        return TargetConfig(lse=lse, target=TileConfig(128, entries, min(dim, 32), num_warps=4, num_stages=4))
    # Eight warps: 0.317 ms for the loss from a joint log-sum-exp at V4-Flash widths (H200), four 0.328.
    tile = TileConfig(block_of(H, largest=64), entries, dim, num_warps=8 if H > 32 else 4, num_stages=3)
    return TargetConfig(lse=tile, target=tile)


def join_warps(H: int, tiles: int) -> int:
    """One warp joins 1,024 log-sum-exps: V4-Pro's 128 heads of 8 tiles."""
    held = block_of(H, largest=2 * H, smallest=1) * block_of(tiles, largest=2 * tiles, smallest=1)
    return max(1, min(16, held // 1024))


# Scores of one slab of queries against the whole pool. 65,536 queries of 16,384 entries would take 4 GiB at once.
SLAB_BYTES = 256 * 2**20
# Columns that one program of the selection holds; a wider row takes a round of chunks first. At 65,536 queries of
# 16,384 entries (H200): 25.5 ms in chunks of 4,096, 28.6 of 8,192, 29.6 with rows whole.
SELECT_WIDTH = 4096


@dataclass(frozen=True)
class ScoreConfig:
    """One program: a tile of ``queries`` by ``entries``, over all heads."""

    queries: int
    entries: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class IndexerBackwardConfig:
    """One program: ``heads`` of one query, over its selected entries in tiles of ``entries``."""

    heads: int
    entries: int
    num_warps: int
    num_stages: int


def score_config(architecture: str, Di: int, itemsize: int) -> ScoreConfig:
    """A tile that keeps both the products of one head and the sum over heads in registers.

    0.103 ms at V4-Flash widths on an H200; 128 x 128 at 8 warps 0.148, 64 x 256 at 8 warps 0.134, 64 x 64 0.110.
    """
    if itemsize == 4 or Di > 128:
        return ScoreConfig(queries=32, entries=64, num_warps=4, num_stages=2)
    if architecture == "sm_80":  # no wgmma: operands take registers too, and the larger tile spills
        return ScoreConfig(queries=64, entries=64, num_warps=4, num_stages=3)
    return ScoreConfig(queries=64, entries=128, num_warps=4, num_stages=3)


def select_config(columns: int) -> RowConfig:
    """One warp holds 1,024 columns: 0.037 ms for 4,096 rows (H200), eight 0.052."""
    width = block_of(columns, largest=SELECT_WIDTH)
    return RowConfig(rows=1, width=width, num_warps=max(1, width // 1024))


def sort_config(topk: int) -> RowConfig:
    """One warp sorts 512 winners: 0.046 ms for 4,096 rows (H200), two 0.069."""
    width = block_of(topk, largest=SELECT_WIDTH // 2)
    return RowConfig(rows=1, width=width, num_warps=max(1, min(16, width // 512)))


def indexer_backward_config(Hi: int, Di: int, itemsize: int) -> IndexerBackwardConfig:
    """All heads of a query in one program, so that a gathered key serves them all."""
    heads = block_of(Hi, largest=64 if itemsize == 2 and Di <= 128 else 32)
    return IndexerBackwardConfig(heads=heads, entries=64 if itemsize == 2 else 32, num_warps=4, num_stages=2)
