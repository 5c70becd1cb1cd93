"""What torch.compile and torch.export make of indexer and loss together: one graph each way, and one for every size."""

from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import indexer_ops
from backends import BACKENDS, DEVICE, needs_kernels
from whole_loss import Graphs, fused_calls

LEARNING = ("q", "k", "weights")
OPERANDS = (*LEARNING, "query", "pool", "window_kv", "sink", "doc_start", "entry_start", "entry_stop")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer_operands(B=1, S=5, P=4, seed=0, dtype=torch.float32, documents=True):
    """One CSA layer's operands by name: indexer, attention, and bounds of two packed documents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (B, S, 3, 16), "k": (B, P, 16), "weights": (B, S, 3),
        "query": (B, S, 6, 16), "pool": (B, P, 16), "window_kv": (B, S, 16), "sink": (6,),
    }  # fmt: skip
    operands = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    operands["weights"], operands["sink"] = operands["weights"].float(), operands["sink"].float()
    second = torch.arange(S) >= S // 2
    stop = ((torch.arange(S) + 1) * P // S).expand(B, S).int()
    operands["doc_start"] = torch.where(second, S // 2, 0).expand(B, S).int()
    operands["entry_start"] = torch.where(second, P // 3, 0).expand(B, S).int()
    operands["entry_stop"] = stop
    if not documents:
        operands |= {"doc_start": None, "entry_start": None, "entry_stop": None}
    operands = {name: None if value is None else value.to(DEVICE).contiguous() for name, value in operands.items()}
    for name in LEARNING:
        operands[name].requires_grad_()
    return operands


def indexer_and_loss(
    q, k, weights, query, pool, window_kv, sink, doc_start, entry_start, entry_stop, topk=3, backend="composite",
):  # fmt: skip
    scores, idxs = indexer_ops.indexer_topk(q, k, weights, entry_start, entry_stop, topk=topk, ratio=2, backend=backend)
    return indexer_ops.distill_loss(
        scores, idxs, query, pool, scale=0.3, window_kv=window_kv, sink=sink, doc_start=doc_start, window=3,
        reduction="valid_mean", backend=backend,
    )  # fmt: skip


def loss_and_gradients(operands, function, **options):
    loss = function(*(operands[name] for name in OPERANDS), **options)
    return loss.detach(), *torch.autograd.grad(loss, [operands[name] for name in LEARNING])


def assert_equals_eager(operands, compiled, **options):
    actual = loss_and_gradients(operands, compiled, **options)
    for got, expected in zip(actual, loss_and_gradients(operands, indexer_and_loss, **options), strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected)


# --- The nodes ----------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_nodes(dynamic, documents):
    graphs = Graphs()
    compiled = torch.compile(indexer_and_loss, fullgraph=True, backend=graphs.backend, dynamic=dynamic)
    assert_equals_eager(layer_operands(documents=documents), compiled, backend="triton")
    assert_expected_inline(
        fused_calls(graphs.forward),
        """\
v4idx._indexer_topk.default
v4idx._window_lse.default
v4idx._distill_loss.default""",
    )
    assert_expected_inline(
        fused_calls(graphs.backward),
        """\
v4idx._distill_loss_backward.default
v4idx._indexer_topk_backward.default""",
    )


def test_the_composite_is_aten_alone():
    graphs = Graphs()
    compiled = torch.compile(indexer_and_loss, fullgraph=True, backend=graphs.backend, dynamic=False)
    assert_equals_eager(layer_operands(), compiled)
    assert fused_calls(graphs.forward) == fused_calls(graphs.backward) == ""


@needs_kernels
def test_backward_takes_no_score_matrix():
    graphs = Graphs()
    compiled = torch.compile(indexer_and_loss, fullgraph=True, backend=graphs.backend, dynamic=False)
    loss_and_gradients(layer_operands(S=31, P=29), compiled, backend="triton")
    saved = [node.meta["val"].shape for node in graphs.backward[0].graph.nodes if node.op == "placeholder"]
    assert saved and not any(31 in shape and 29 in shape for shape in saved)


@needs_kernels
def test_gradients_that_nobody_asks_for_are_not_in_the_graph():
    graphs, operands = Graphs(), layer_operands()
    operands["k"].requires_grad_(False)
    compiled = torch.compile(indexer_and_loss, fullgraph=True, backend=graphs.backend, dynamic=False)
    compiled(*(operands[name] for name in OPERANDS), backend="triton").backward()
    (node,) = (n for n in graphs.backward[0].graph.nodes if "_indexer_topk_backward" in str(n.target))
    assert list(node.args[5]) == [True, False, True]
    assert operands["k"].grad is None and operands["q"].grad.any()


# --- One compile --------------------------------------------------------------------------------------------------


@needs_kernels
def test_one_compile_for_new_sizes_and_documents():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(indexer_and_loss, fullgraph=True, backend=counter, dynamic=True)
    assert_equals_eager(layer_operands(B=2, S=7, P=5), compiled, backend="triton")
    compiles = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        operands = layer_operands(B=3, S=5, P=8, seed=2)
        operands["entry_start"] = operands["entry_start"].clamp(max=1)
        operands["doc_start"] = torch.zeros_like(operands["doc_start"])
        assert_equals_eager(operands, compiled, backend="triton")
    assert counter.frame_count == compiles


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compile_for_new_offsets_widths_and_sizes(backend):
    def select(q, k, weights, topk, offset):
        return indexer_ops.indexer_topk(q, k, weights, topk=topk, ratio=2, query_offset=offset, backend=backend)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager", dynamic=True)
    for index, (topk, offset, S, P) in enumerate([(4, 8, 7, 5), (2, 9, 6, 9)]):
        operands = layer_operands(B=2 + index, S=S, P=P, seed=index, documents=False)
        arguments = (*(operands[name].detach() for name in LEARNING), topk, offset)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            scores, idxs = compiled(*arguments)
        expected_scores, expected_idxs = select(*arguments)
        assert scores.shape == (2 + index, S, topk) and torch.equal(idxs, expected_idxs)
        torch.testing.assert_close(scores, expected_scores)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_bounds_raise_inside_the_graph(backend):
    def select(q, k, weights, entry_start, entry_stop):
        return indexer_ops.indexer_topk(
            q, k, weights, entry_start, entry_stop, topk=2, ratio=2, backend=backend, check_inputs=True
        )

    graphs, operands = Graphs(), layer_operands()
    compiled = torch.compile(select, fullgraph=True, backend=graphs.backend, dynamic=True)
    names = (*LEARNING, "entry_start", "entry_stop")
    compiled(*(operands[name] for name in names))
    assert fused_calls(graphs.forward).count("v4idx._check_range.default") == 3
    operands["entry_stop"][0, 4] = 6
    with pytest.raises(ValueError, match=r"entry_stop\[0, 4\] is 6, outside \[0, 5\)"):
        compiled(*(operands[name] for name in names))


# --- Export -------------------------------------------------------------------------------------------------------


class IndexerAndLoss(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, q, k, weights, query, pool, window_kv, sink, doc_start, entry_start, entry_stop):
        return indexer_and_loss(
            q, k, weights, query, pool, window_kv, sink, doc_start, entry_start, entry_stop, backend=self.backend
        )


def exported(backend, dynamic_rows):
    operands = layer_operands(B=2, S=5)
    B, P = (torch.export.Dim(name, min=2, max=4096) for name in "BP")
    S = torch.export.Dim("S", min=2, max=4096) if dynamic_rows else None
    shapes = {name: {0: B, 1: P if name in ("k", "pool") else S} for name in OPERANDS} | {"sink": {}}
    arguments = tuple(operands[name].detach() for name in OPERANDS)
    program = torch.export.export(IndexerAndLoss(backend), arguments, dynamic_shapes=shapes).run_decompositions()
    other = layer_operands(B=3, S=7 if dynamic_rows else 5, P=8, seed=1)
    arguments = tuple(other[name].detach() for name in OPERANDS)
    torch.testing.assert_close(program.module()(*arguments), indexer_and_loss(*arguments, backend=backend))
    return "\n".join(str(node.target) for node in program.graph.nodes if str(node.target).startswith("v4idx"))


@needs_kernels
def test_export_keeps_the_private_ops():
    assert_expected_inline(
        exported("triton", dynamic_rows=True),
        """\
v4idx._indexer_topk.default
v4idx._window_lse.default
v4idx._distill_loss.default""",
    )


def test_export_of_the_composite_is_aten_alone():
    # The window's composite walks over blocks of rows, so their number is fixed here.
    assert exported("composite", dynamic_rows=False) == ""


# --- Checkpointing and autocast -----------------------------------------------------------------------------------


class FusedCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "v4idx":
            self.names.append(op.__name__)
        return op(*args, **(kwargs or {}))


def checkpointed_loss(save):
    context = partial(create_selective_checkpoint_contexts, save)

    def loss(*operands, backend):
        return checkpoint(
            # A multiplication that is replayed: the graph holds what depends on a saved output and what does not.
            lambda q, *rest: indexer_and_loss(1.5 * q, *rest, backend=backend),
            *operands, use_reentrant=False, context_fn=context,
        )  # fmt: skip

    return loss


@needs_kernels
def test_selective_checkpointing_keeps_topk_out_of_the_replay():
    operands = layer_operands()
    forward = ["_indexer_topk.default", "_window_lse.default", "_distill_loss.default"]
    backward = ["_distill_loss_backward.default", "_indexer_topk_backward.default"]
    gradients = []
    for save, replayed in ((list(indexer_ops.SAC_SAVE_OPS), []), ([], forward)):
        with FusedCalls() as calls:
            gradients.append(loss_and_gradients(operands, checkpointed_loss(save), backend="triton"))
        assert calls.names == [*forward, *replayed, *backward]
    for saved, recomputed in zip(*gradients, strict=True):
        assert torch.equal(saved, recomputed)


@needs_kernels
@pytest.mark.parametrize("saves", [True, False])
def test_selective_checkpointing_in_a_compiled_graph(saves):
    save = list(indexer_ops.SAC_SAVE_OPS) if saves else [torch.ops.aten.mul.Tensor]
    graphs = Graphs()
    backend = aot_autograd(
        fw_compiler=Graphs._keeper(graphs.forward),
        bw_compiler=Graphs._keeper(graphs.backward),
        partition_fn=min_cut_rematerialization_partition,  # the one that heeds what checkpointing asks for
    )
    compiled = torch.compile(checkpointed_loss(save), fullgraph=True, backend=backend, dynamic=False)
    loss_and_gradients(layer_operands(), compiled, backend="triton")
    assert ("_indexer_topk.default" in fused_calls(graphs.backward)) != saves
    assert fused_calls(graphs.backward).endswith("v4idx._indexer_topk_backward.default")


# A compiled composite is left out: AOTAutograd traces its backward pass under the autocast of the forward pass.
@pytest.mark.parametrize(
    "compiles, backend",
    [(False, "composite"), *(pytest.param(compiles, "triton", marks=needs_kernels) for compiles in (False, True))],
)
def test_autocast_changes_nothing(compiles, backend):
    """No op casts: index scores stay float32 under autocast, and so does what is compiled there."""
    operands = layer_operands()
    expected = loss_and_gradients(operands, indexer_and_loss, backend=backend)
    function = torch.compile(indexer_and_loss, fullgraph=True, backend="aot_eager") if compiles else indexer_and_loss

    def under_autocast(*arguments, backend):
        with torch.autocast(DEVICE, torch.bfloat16):
            return function(*arguments, backend=backend)

    actual = loss_and_gradients(operands, under_autocast, backend=backend)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted)
