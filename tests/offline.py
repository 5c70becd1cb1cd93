"""Compile the kernels for GPUs that are not there: record the launches of a call on meta tensors and compile them.

Runs only where Triton is not interpreted: see ``test_offline_compile.py``, which starts a process of its own for it.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: tuple
    options: dict


@dataclass(frozen=True)
class Resources:
    """What the compiled kernel asks of one program: registers a thread, bytes of spills, bytes of shared memory."""

    registers: int
    spills: int
    shared_memory: int


@contextmanager
def recorded_launches(architecture: str) -> Iterator[list[Launch]]:
    """Launches become records; the launchers choose their configurations as on ``architecture``."""
    from indexer_ops._triton import configs

    launches: list[Launch] = []

    def record(self, *arguments, grid, warmup, **options):
        launches.append(Launch(self, arguments, options))

    run, chosen = JITFunction.run, configs.architecture
    JITFunction.run, configs.architecture = record, lambda device: architecture
    try:
        yield launches
    finally:
        JITFunction.run, configs.architecture = run, chosen


def launches_of(call: Callable[[], object], architecture: str) -> list[Launch]:
    """The launches that ``call``, a launcher on meta tensors, makes on ``architecture``."""
    with recorded_launches(architecture) as launches:
        call()
    return launches


def _source(launch: Launch) -> tuple[ASTSource, dict]:
    options = dict(launch.options)
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments[position] if position < len(launch.arguments) else options.pop(name)
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:  # as the just-in-time compiler does
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes), options


def compile_launch(launch: Launch, architecture: str) -> Resources:
    """Compile one launch for ``architecture`` and read what it needs off the machine code."""
    source, options = _source(launch)
    compiled = triton.compile(source, target=TARGETS[architecture], options=options)
    if TARGETS[architecture].backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly).group(1))
        spills = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1))
    else:
        usage = _resource_usage(compiled.asm["cubin"])
        registers = int(re.search(r"REG:(\d+)", usage).group(1))
        # Local memory of a kernel without local arrays is what the register allocator spilled.
        spills = int(re.search(r"LOCAL:(\d+)", usage).group(1)) + int(re.search(r"STACK:(\d+)", usage).group(1))
    return Resources(registers, spills, compiled.metadata.shared)


def _resource_usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _deterministically(call: Callable[[], object]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)


def launcher_calls(
    H: int, D: int, P: int, K: int, S: int, window: int, Hi: int, Di: int
) -> dict[str, Callable[[], object]]:
    """One call of every launcher at these widths, bfloat16 operands."""
    from indexer_ops._triton import distill_kl, distill_target, indexer_topk, window_lse

    float32 = torch.float32
    query, pool, keys = _meta(1, S, H, D), _meta(1, P, D), _meta(1, S, D)
    idxs, lse, sink = _meta(1, S, K, dtype=torch.int32), _meta(1, S, H, dtype=float32), _meta(H, dtype=float32)
    rows, row = _meta(1, S, K, dtype=float32), _meta(1, S, dtype=float32)
    doc_start, per_head_keys = _meta(1, S, dtype=torch.int32), _meta(1, S, H, D)
    q, k, weights = _meta(1, S, Hi, Di), _meta(1, P, Di), _meta(1, S, Hi, dtype=float32)
    long_k = _meta(1, 2**18, Di)  # one million tokens at ratio 4: selected in rounds
    bound = _meta(1, S, dtype=torch.int32)
    all_needed = (True, True, True)
    scale, eps = D**-0.5, 1e-10
    return {
        "window": lambda: window_lse.window_lse(query, keys, sink, None, window, scale, 0),
        "window of packed documents": lambda: window_lse.window_lse(query, keys, sink, doc_start, window, scale, 0),
        "window, keys per head": lambda: window_lse.window_lse(query, per_head_keys, sink, None, window, scale, 0),
        "full causal": lambda: window_lse.window_lse(query, keys, sink, None, 0, scale, 0),
        "target": lambda: distill_target.distill_target(query, pool, idxs, lse, None, scale, True),
        "target of selected entries": lambda: distill_target.distill_target(query, pool, idxs, None, None, scale, True),
        "target from a joint LSE": lambda: distill_target.distill_target(query, pool, idxs, None, lse, scale, True),
        "KL": lambda: distill_kl.distill_kl(rows, rows, idxs, eps),
        "KL backward": lambda: distill_kl.distill_kl_backward(row, rows, rows, idxs, eps),
        "indexer": lambda: indexer_topk.indexer_topk(q, k, weights, None, None, K, 4, 0),
        "indexer of packed documents": lambda: indexer_topk.indexer_topk(q, k, weights, bound, bound, K, 4, 0),
        "indexer, long pool": lambda: indexer_topk.indexer_topk(q[:, :1], long_k, weights[:, :1], None, None, K, 4, 0),
        "indexer backward": lambda: indexer_topk.indexer_topk_backward(rows, q, k, weights, idxs, all_needed),
        "indexer backward, deterministic": lambda: _deterministically(
            lambda: indexer_topk.indexer_topk_backward(rows, q, k, weights, idxs, all_needed)
        ),
    }


WIDTHS = {
    "V4-Flash": dict(H=64, D=512, P=1024, K=512, S=4096, window=128, Hi=64, Di=128),
    "V4-Pro": dict(H=128, D=512, P=1024, K=1024, S=4096, window=128, Hi=64, Di=128),
    "small": dict(H=8, D=128, P=1024, K=256, S=4096, window=64, Hi=4, Di=32),
    "odd": dict(H=5, D=80, P=1000, K=100, S=1001, window=100, Hi=3, Di=48),
}


def compile_everything(architecture: str) -> dict[str, Resources | str]:
    """Resources of every launch at every set of widths, or the error that compiling it raised."""
    results: dict[str, Resources | str] = {}
    for widths, sizes in WIDTHS.items():
        for name, call in launcher_calls(**sizes).items():
            for launch in launches_of(call, architecture):
                key = f"{widths}: {name}: {launch.kernel.__name__}"
                try:
                    results[key] = compile_launch(launch, architecture)
                except Exception as error:
                    results[key] = f"{type(error).__name__}: {error}"
    return results


if __name__ == "__main__":
    compiled = compile_everything(sys.argv[1])
    print(json.dumps({key: value if isinstance(value, str) else asdict(value) for key, value in compiled.items()}))
