"""What torch.compile makes of the whole loss: one graph each way, and exactly which ops stand in it."""

import textwrap

import pytest
import torch
from expecttest import assert_expected_inline

import indexer_ops
from backends import needs_kernels
from indexer_ops import reference
from whole_loss import Graphs, LossModule, called, fused_calls, learning_inputs, loss_and_gradient

# They move no data, or fill a scalar: how many there are is the tracer's choice, and differs between releases of torch.
BOOKKEEPING = (
    "aten.detach", "aten.view", "aten.unsqueeze", "aten.permute", "aten.expand", "aten.slice", "aten.scalar_tensor",
    "aten.squeeze", "aten.alias", "aten.full", "aten.sym_size",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_of(backend, dynamic=False, **sizes):
    graphs = Graphs()
    compiled = torch.compile(indexer_ops.distill_loss, fullgraph=True, backend=graphs.backend, dynamic=dynamic)
    loss_and_gradient(learning_inputs(**sizes), backend, compiled)
    return graphs


def computing(graphs):
    names = [name for name in called(graphs) if name.rsplit(".", 1)[0] not in BOOKKEEPING]
    return textwrap.fill(" ".join(names), 116)


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_nodes(dynamic):
    graphs = graphs_of("triton", dynamic)
    assert_expected_inline(
        fused_calls(graphs.forward),
        """\
v4idx._window_lse.default
v4idx._distill_loss.default""",
    )
    assert_expected_inline(fused_calls(graphs.backward), """v4idx._distill_loss_backward.default""")


def test_composite_graph():
    graphs = graphs_of("composite")
    assert_expected_inline(
        computing(graphs.forward),
        """\
aten.arange.default aten.add.Tensor aten.sub.Tensor aten.add.Tensor aten.arange.default aten.add.Tensor
aten.clamp.default aten.index_select.default aten.clamp.default aten.index.Tensor aten.bmm.default aten.mul.Tensor
aten.sub.Tensor aten.add.Tensor aten.clamp.default aten.clamp.default aten.ge.Tensor aten.le.Tensor
aten.bitwise_and.Tensor aten.bitwise_not.default aten.masked_fill.Scalar aten.amax.default aten.eq.Scalar
aten.where.self aten.sub.Tensor aten.exp.default aten.sum.dim_IntList aten.log.default aten.add.Tensor
aten.maximum.default aten.eq.Scalar aten.minimum.default aten.sub.Tensor aten.where.self aten.eq.Scalar
aten.exp.default aten.log1p.default aten.add.Tensor aten.where.self aten.ge.Scalar aten.lt.Scalar
aten.bitwise_and.Tensor aten.arange.default aten.where.self aten.index.Tensor aten.bmm.default aten.mul.Tensor
aten.bitwise_not.default aten.masked_fill.Scalar aten.amax.default aten.eq.Scalar aten.where.self aten.sub.Tensor
aten.exp.default aten.sum.dim_IntList aten.log.default aten.add.Tensor aten.maximum.default aten.eq.Scalar
aten.minimum.default aten.sub.Tensor aten.where.self aten.eq.Scalar aten.exp.default aten.log1p.default
aten.add.Tensor aten.where.self aten.sub.Tensor aten.where.self aten.clamp.default aten.exp.default
aten.sum.dim_IntList aten.sum.dim_IntList aten.clamp.default aten.div.Tensor aten.lt.Scalar aten.where.self
aten.ge.Scalar aten.bitwise_not.default aten.masked_fill.Scalar aten.amax.default aten.eq.Scalar aten.where.self
aten.sub.Tensor aten.exp.default aten.sum.dim_IntList aten.gt.Scalar aten.where.self aten.div.Tensor
aten.sum.dim_IntList aten.gt.Scalar aten.bitwise_and.Tensor aten.add.Tensor aten.log.default aten.add.Tensor
aten.log.default aten.sub.Tensor aten.mul.Tensor aten.where.self aten.sum.dim_IntList aten.sum.default
aten.div.Tensor""",
    )
    assert_expected_inline(
        computing(graphs.backward),
        """\
aten.div.Tensor aten.where.self aten.mul.Tensor aten.neg.default aten.div.Tensor aten.div.Tensor aten.div.Tensor
aten.neg.default aten.mul.Tensor aten.div.Tensor aten.sum.dim_IntList aten.where.self aten.add.Tensor
aten.mul.Tensor aten.masked_fill.Scalar""",
    )


def graphs_of_three_ops():
    def loss(index_scores, topk_idxs, query, pool, window_kv, sink):
        lse = indexer_ops.window_lse(query, window_kv, sink, window=3, scale=0.3, backend="triton")
        target = indexer_ops.distill_target(query, pool, topk_idxs, lse, scale=0.3, backend="triton")
        return indexer_ops.distill_kl(index_scores, target, topk_idxs, backend="triton").mean()

    graphs, case = Graphs(), learning_inputs()
    compiled = torch.compile(loss, fullgraph=True, backend=graphs.backend)
    compiled(*(getattr(case, name) for name in LossModule.ARGUMENTS)).backward()
    return graphs


@needs_kernels
def test_fused_nodes_of_three_ops():
    graphs = graphs_of_three_ops()
    assert_expected_inline(
        fused_calls(graphs.forward),
        """\
v4idx._window_lse.default
v4idx._distill_target.default
v4idx._distill_kl.default""",
    )
    assert_expected_inline(fused_calls(graphs.backward), """v4idx._distill_kl_backward.default""")


def shapes_into_backward(graphs):
    saved = [node for node in graphs.backward[0].graph.nodes if node.op == "placeholder"]
    return sorted(str(list(node.meta["val"].shape)) for node in saved)


@needs_kernels
def test_what_backward_takes():
    """The slope, and: of the KL scores, target and indices; of the one pass its gradient, and the scores for their
    dtype. No other intermediate."""
    assert shapes_into_backward(graphs_of_three_ops()) == ["[2, 6, 4]"] * 3 + ["[]"]
    assert shapes_into_backward(graphs_of("triton")) == ["[2, 6, 4]"] * 2 + ["[]"]


def test_traced_calls_do_not_chunk(monkeypatch):
    """With a budget of one byte an eager call takes one row at a time; a traced one must not unroll that loop."""
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 1)
    nodes = []
    for S in (3, 12):
        torch._dynamo.reset()
        graphs = graphs_of("composite", S=S, T=12)
        nodes.append((called(graphs.forward), called(graphs.backward)))
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_check_inputs_is_in_the_graph(dynamic):
    def checked(index_scores, topk_idxs, query, pool):
        return indexer_ops.distill_loss(
            index_scores, topk_idxs, query, pool, scale=0.3, backend="composite", check_inputs=True
        )

    graphs, case = Graphs(), learning_inputs()
    compiled = torch.compile(checked, fullgraph=True, backend=graphs.backend, dynamic=dynamic)
    arguments = (case.index_scores, case.topk_idxs, case.query, case.pool)
    torch.testing.assert_close(compiled(*arguments), checked(*arguments))
    assert fused_calls(graphs.forward) == "v4idx._check_range.default"
    case.topk_idxs[1, 2, 3] = 5
    with pytest.raises(IndexError, match=r"topk_idxs\[1, 2, 3\] is 5, outside \[-1, 5\)"):
        compiled(*arguments)
