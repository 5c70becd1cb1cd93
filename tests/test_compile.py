"""Compiled and exported, the whole loss gives what it gives eagerly, and one compile serves every size."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.testing import CompileCounterWithBackend

import indexer_ops
import inputs
import tolerance
from backends import BACKENDS, needs_kernels
from whole_loss import LossModule, learning_inputs, loss_and_gradient


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_equals_eager(case, backend, compiled):
    for actual, expected in zip(loss_and_gradient(case, backend, compiled), loss_and_gradient(case, backend)):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager(backend):
    compiled = torch.compile(indexer_ops.distill_loss, fullgraph=True, backend="aot_eager", dynamic=False)
    for seed in (0, 1):
        assert_equals_eager(learning_inputs(seed=seed), backend, compiled)


# The composite's window walks over blocks of 64 rows, and torch makes a case of its own of a single block.
@pytest.mark.parametrize(
    "backend, rows", [("composite", (70, 66, 139)), pytest.param("triton", (6, 9, 13), marks=needs_kernels)]
)
def test_one_compile_for_three_sizes(backend, rows):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(indexer_ops.distill_loss, fullgraph=True, backend=counter, dynamic=True)
    assert_equals_eager(learning_inputs(B=2, S=rows[0], P=5, K=4), backend, compiled)
    # Dynamo may start anew while it compiles the first, where it learns that scale and window are constants.
    compiles = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equals_eager(learning_inputs(B=3, S=rows[1], P=7, K=3), backend, compiled)
        assert_equals_eager(learning_inputs(B=2, S=rows[2], P=11, K=9), backend, compiled)
    assert counter.frame_count == compiles


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compile_for_three_query_offsets(backend):
    def lse(query, keys, offset):
        return indexer_ops.window_lse(query, keys, window=4, scale=0.3, query_offset=offset, backend=backend)

    compiled = torch.compile(lse, fullgraph=True, backend="aot_eager", dynamic=True)
    for index, (offset, T) in enumerate([(3, 11), (5, 13), (8, 30)]):
        case = inputs.attention_inputs(T=T)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            actual = compiled(case.query, case.window_kv, offset)
        torch.testing.assert_close(actual, lse(case.query, case.window_kv, offset))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 4])
def test_every_denominator_compiles(backend, window):
    def both(query, keys, pool, topk_idxs, sink, doc_start):
        lse = indexer_ops.window_lse(query, keys, sink, doc_start, window=window, scale=0.3, backend=backend)
        joint = indexer_ops.distill_target(query, pool, topk_idxs, None, lse, scale=0.3, backend=backend)
        return joint, indexer_ops.distill_target(query, pool, topk_idxs, scale=0.3, normalize=False, backend=backend)

    case = inputs.attention_inputs()
    doc_start = torch.tensor([0, 0, 0, 3, 3, 3], device=case.query.device).expand(2, 6)
    arguments = (case.query, case.window_kv, case.pool, case.topk_idxs, case.sink, doc_start)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for actual, expected in zip(compiled(*arguments), both(*arguments)):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor(backend):
    compiled = torch.compile(indexer_ops.distill_loss, fullgraph=True)
    case = learning_inputs(B=1, S=4, H=2)
    loss, gradient = loss_and_gradient(case, backend, compiled)
    expected_loss, expected_gradient = loss_and_gradient(case, backend)
    # Inductor may sum in another order: each keeps within the bound, so they differ by twice that.
    target = torch.full((1, 4, 4), 0.25)
    tolerance.assert_within(loss, expected_loss, 2 * tolerance.distill_kl(case.index_scores, target, 1e-10).amax())
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_raises_while_compiling(backend):
    compiled = torch.compile(indexer_ops.distill_target, fullgraph=True, backend="aot_eager")
    case = inputs.attention_inputs()
    with pytest.raises(Exception, match=r"pool\.shape\[2\] must be D = 16"):
        compiled(case.query, case.pool[..., :8], case.topk_idxs, scale=0.3, backend=backend)


def exported(backend, S=None):
    case = inputs.attention_inputs()
    B, P, K = (torch.export.Dim(name, min=2, max=4096) for name in "BPK")
    dynamic_shapes = {
        "index_scores": {0: B, 1: S, 2: K},
        "topk_idxs": {0: B, 1: S, 2: K},
        "query": {0: B, 1: S},
        "pool": {0: B, 1: P},
        "window_kv": {0: B, 1: S},
        "sink": {},
    }
    arguments = tuple(getattr(case, name) for name in LossModule.ARGUMENTS)
    program = torch.export.export(LossModule(backend), arguments, dynamic_shapes=dynamic_shapes)
    return program.run_decompositions()


def assert_program_equals_eager(program, case, backend):
    actual = program.module()(*(getattr(case, name) for name in LossModule.ARGUMENTS))
    case.index_scores.requires_grad_()
    torch.testing.assert_close(actual, loss_and_gradient(case, backend)[0])


@needs_kernels
def test_export_keeps_the_private_ops():
    program = exported("triton", S=torch.export.Dim("S", min=2, max=4096))
    targets = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("v4idx")]
    assert_expected_inline(
        "\n".join(targets),
        """\
v4idx._window_lse.default
v4idx._distill_loss.default""",
    )
    assert_program_equals_eager(program, inputs.attention_inputs(B=3, S=9, P=8, K=6), "triton")


def test_export_of_the_composite_is_aten_alone():
    # Its banded window walks over blocks of rows, so the number of rows is fixed here.
    program = exported("composite")
    namespaces = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert "aten" in namespaces and "v4idx" not in namespaces
    assert_program_equals_eager(program, inputs.attention_inputs(B=3, P=8, K=6), "composite")
