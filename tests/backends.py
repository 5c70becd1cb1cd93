"""What this machine can run: where tensors live, which backends serve them, in which dtypes.

With a GPU the kernels run on it; without one Triton's interpreter runs them on CPU tensors (conftest.py sets it up).
The interpreter is wrong for bfloat16 (it multiplies bit patterns), so the kernels take bfloat16 on a GPU only.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from indexer_ops import dispatch

DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"

HAS_KERNELS = importlib.util.find_spec("triton") is not None and DEVICE in dispatch.FUSED_DEVICES
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
BACKENDS = ("composite", pytest.param("triton", marks=needs_kernels))

_KERNEL_DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
BACKENDS_AND_DTYPES = [
    *(pytest.param("composite", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)),
    *(pytest.param("triton", dtype, marks=needs_kernels) for dtype in _KERNEL_DTYPES),
]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill ``torch.empty`` with NaN, so that an output that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
