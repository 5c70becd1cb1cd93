"""What the device can do at most, measured beside the ops."""

from dataclasses import dataclass

import torch

from .timing import CpuClock, GpuClock


@dataclass(frozen=True)
class Ceilings:
    """Of one device, with what they were measured on."""

    matrix_tflops: float
    copy_terabytes_per_second: float  # bytes read and bytes written
    description: str


def measure_ceilings(clock: CpuClock | GpuClock, device: torch.device) -> Ceilings:
    """A square matrix product of random numbers (zeros would draw less power and run faster) and a copy."""
    on_gpu = device.type == "cuda"
    # The composites, which are what a CPU runs, compute in float32.
    size, dtype, copied_bytes = (8192, torch.bfloat16, 2 * 2**30) if on_gpu else (512, torch.float32, 32 * 2**20)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    matrix = clock.measure(lambda: None, lambda _: torch.mm(left, right, out=product), False)
    source = torch.randint(0, 256, (copied_bytes,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copy = clock.measure(lambda: None, lambda _: destination.copy_(source), False)
    return Ceilings(
        matrix_tflops=2 * size**3 / matrix.median / 1e9,
        copy_terabytes_per_second=2 * copied_bytes / copy.median / 1e9,
        description=f"{size}^3 {str(dtype).removeprefix('torch.')} product, copy of {copied_bytes // 2**20:,} MiB",
    )
