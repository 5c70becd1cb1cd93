"""Running a test's function on several ranks, with an end to waiting."""

import time

import torch.multiprocessing


def run_on_ranks(function, world_size, *arguments, seconds=90):
    """``function(rank, world_size, *arguments)`` in as many processes; fails where one raises or hangs."""
    context = torch.multiprocessing.spawn(function, (world_size, *arguments), nprocs=world_size, join=False)
    end = time.monotonic() + seconds
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            assert time.monotonic() < end, f"a rank hangs after {seconds} s"
    finally:
        for process in context.processes:
            process.kill()
