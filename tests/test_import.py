"""What the first import costs, what the environment switches do, and graphs that outlive their process."""

import sys

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["window_lse", "distill_target", "distill_kl", "distill_kl_backward"]

INPUTS = f"""
import torch, indexer_ops
torch.set_default_device({DEVICE!r})
torch.manual_seed(0)
query, window_kv, sink = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 16), torch.randn(2)
pool, index_scores, target = torch.randn(1, 4, 16), torch.randn(1, 8, 4), torch.rand(1, 8, 4)
topk_idxs = torch.tensor([2, 0, -1, 3]).expand(1, 8, 4)

def loss(scores, backend="auto"):
    return indexer_ops.distill_loss(
        scores, topk_idxs, query, pool, scale=0.25, window_kv=window_kv, sink=sink, window=4, backend=backend
    )

def value_and_gradient(function, *arguments):
    scores = index_scores.clone().requires_grad_()
    value = function(scores, *arguments)
    return value.detach(), *torch.autograd.grad(value.sum(), scores)
"""

COUNT_LAUNCHES = f"""
from importlib import import_module
launches = []

def count(kernel):
    module = import_module("indexer_ops._triton." + kernel.removesuffix("_backward"))
    launcher = getattr(module, kernel)
    def launch(*arguments):
        launches.append(kernel)
        return launcher(*arguments)
    setattr(module, kernel, launch)

for kernel in {KERNELS}:
    count(kernel)
"""


def test_import_costs_torch_and_nothing_else(fresh_process):
    # The FLOP counter is torch's own; where the FLOP formulas are registered with it, it brings Triton along.
    code = """
import sys, torch, torch.utils.flop_counter
of_torch = set(sys.modules)
import indexer_ops
print(*(set(sys.modules) - of_torch))
print(*(set(sys.modules) & {"torch._dynamo", "torch._inductor"}))
"""
    new, compilers = fresh_process(code).splitlines()
    roots = {name.partition(".")[0] for name in new.split()}
    assert roots <= {"indexer_ops", "torch", *sys.stdlib_module_names, *private_stdlib_modules(roots)}
    assert "indexer_ops._triton" not in new.split()
    assert compilers == ""


def private_stdlib_modules(roots: set[str]) -> set[str]:
    """``_sysconfigdata_...`` carries the platform's name, which no list of the standard library has."""
    return {root for root in roots if root.startswith("_sysconfigdata_")}


def test_without_triton_everything_is_the_composite(fresh_process):
    code = """
import warnings
value, gradient = value_and_gradient(loss)
assert value > 0 and gradient.abs().sum() > 0
try:
    loss(index_scores, "triton")
except NotImplementedError as refusal:
    print(refusal)
arguments = (index_scores, target, topk_idxs, 1e-10)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        degraded = torch.ops.v4idx._distill_kl(*arguments, False)
print(*(warning.message for warning in caught))
torch.testing.assert_close(degraded, indexer_ops.distill_kl(*arguments[:3], backend="composite"), rtol=0, atol=0)
"""
    refusal, warning = fresh_process(INPUTS + code, hidden=("triton",), TRITON_INTERPRET="1").splitlines()
    assert "Triton is not installed" in refusal
    assert "v4idx::distill_kl" in warning and "No module named 'triton'" in warning


@pytest.mark.parametrize(
    ("switch", "launched"),
    [({"V4IDX_BACKEND": "composite"}, []), ({"V4IDX_DISABLE": "window_lse, distill_kl"}, ["distill_target"])],
    ids=["backend", "disable"],
)
def test_switched_off_op_runs_its_reference(switch, launched, fresh_process):
    code = """
import warnings
warnings.filterwarnings("error", message="v4idx")
calls = {
    "window_lse": (query, window_kv, sink, None, 4, 0.25, 0),
    "distill_target": (query, pool, topk_idxs, None, None, 0.25, True),
    "distill_kl": (index_scores, target, topk_idxs, 1e-10),
}
for op, arguments in calls.items():
    expected = getattr(torch.ops.v4idx, op)(*arguments, backend="composite")
    torch.testing.assert_close(getattr(torch.ops.v4idx, "_" + op)(*arguments, False), expected)
value_and_gradient(torch.ops.v4idx._distill_kl, target, topk_idxs, 1e-10, False)
print(launches)
refused = []
for op, arguments in calls.items():
    try:
        getattr(torch.ops.v4idx, op)(*arguments, backend="triton")
    except NotImplementedError as refusal:
        assert "V4IDX_BACKEND" in str(refusal)
        refused.append(op)
print(refused)
"""
    interpret = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
    output = fresh_process(INPUTS + COUNT_LAUNCHES + code, **switch, **interpret)
    refused = [op for op in ("window_lse", "distill_target", "distill_kl") if op not in launched]
    assert output.splitlines() == [str(launched), str(refused)]


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [("V4IDX_BACKEND", "triton", "'triton'"), ("V4IDX_DISABLE", "distill_kl,top_k", "top_k")],
)
def test_unknown_switch_names_its_variable(variable, value, wrong, fresh_process):
    code = """
try:
    import indexer_ops
except ValueError as error:
    print(error)
"""
    message = fresh_process(code, **{variable: value})
    assert message.startswith(variable) and message.rstrip().endswith(wrong)


@pytest.mark.parametrize("triton", ["present", "hidden", "interpreted"])
def test_first_call_of_a_process_may_be_compiled(triton, fresh_process):
    code = """
compiled = value_and_gradient(torch.compile(loss, fullgraph=True), backend)
for ours, expected in zip(compiled, value_and_gradient(loss, "composite")):
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
"""
    interpreted = triton == "interpreted" and DEVICE == "cpu"
    code = f"backend = {'triton' if interpreted else 'auto'!r}\n" + code
    hidden = ("triton",) if triton == "hidden" and DEVICE == "cpu" else ()
    fresh_process(INPUTS + code, hidden=hidden, **({"TRITON_INTERPRET": "1"} if interpreted else {}))


def test_cached_graph_of_another_process_obeys_the_switch_of_this_one(fresh_process):
    code = """
from torch._dynamo.utils import counters

def api(scores): return indexer_ops.distill_kl(scores, target, topk_idxs)
def public(scores): return torch.ops.v4idx.distill_kl(scores, target, topk_idxs)
def private(scores): return torch.ops.v4idx._distill_kl(scores, target, topk_idxs, 1e-10, False)

expected = value_and_gradient(torch.ops.v4idx.distill_kl, target, topk_idxs, 1e-10, "composite")
for function in api, public, private:
    launches.clear()
    counters.clear()
    for ours, right in zip(value_and_gradient(torch.compile(function, fullgraph=True)), expected):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    print(launches)
print(counters["aot_autograd"]["autograd_cache_hit"])
"""
    interpret = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
    # Both processes keep compiled graphs in the directory of this test session.
    code = INPUTS + COUNT_LAUNCHES + code
    *launched, _ = fresh_process(code, **interpret).splitlines()
    # On a CPU only a call of the private op reaches a kernel without being told to.
    chosen = KERNELS[2:] if DEVICE == "cuda" else []
    assert launched == [str(chosen), str(chosen), str(KERNELS[2:])]
    *launched, hits_of_private = fresh_process(code, V4IDX_BACKEND="composite", **interpret).splitlines()
    assert launched == ["[]"] * 3
    assert int(hits_of_private) == 1, "the second process compiled anew, so this test shows nothing"
