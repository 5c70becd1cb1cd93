"""Heads sharded over processes give the loss and gradient of all heads on one."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import indexer_ops
import inputs
from backends import BACKENDS, DEVICE, HAS_KERNELS, needs_kernels

HEADS = 5  # odd: the ranks hold different counts


def loss_and_gradient(case, heads, source, backend, head_group=None):
    """The loss of a slice of the heads, summed over ``head_group``."""
    scores = case.index_scores.detach().requires_grad_()
    options = {"reduction": "none", "backend": backend, "head_group": head_group}
    if source == "window_kv":
        options |= {"window_kv": case.window_kv, "sink": case.sink[heads], "window": 3}
    elif source != "selected":
        options[source] = case.noncompressed_lse[:, :, heads]
    query = case.query[:, :, heads]
    loss = indexer_ops.distill_loss(scores, case.topk_idxs, query, case.pool, scale=case.scale, **options)
    (gradient,) = torch.autograd.grad(loss, scores, case.grad_kl)
    return loss.detach(), gradient


def compare_with_unsharded(rank, world_size, store, backends):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    group = torch.distributed.group.WORLD
    first = HEADS * rank // world_size
    mine = slice(first, HEADS * (rank + 1) // world_size)
    for backend in backends:
        for source in ("window_kv", "noncompressed_lse", "joint_lse", "selected"):
            case = inputs.attention_inputs(B=2, S=5, H=HEADS, P=5, K=4)
            sharded = loss_and_gradient(case, mine, source, backend, group)
            for actual, expected in zip(sharded, loss_and_gradient(case, slice(None), source, backend)):
                torch.testing.assert_close(actual, expected, msg=lambda text: f"{backend}, {source}: {text}")
            if world_size > 1:
                alone, _ = loss_and_gradient(case, mine, source, backend)
                assert not torch.allclose(alone, sharded[0], rtol=1e-3), "one shard alone must not be enough"
    torch.distributed.destroy_process_group()


# Two processes cannot share one GPU's NCCL, and gloo's functional collectives sum on the CPU.
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="gloo sums on the CPU")


def test_two_processes(tmp_path):
    backends = ["composite", "triton"] if HAS_KERNELS else ["composite"]
    torch.multiprocessing.spawn(compare_with_unsharded, (2, str(tmp_path / "store"), backends), nprocs=2)


@pytest.fixture
def group_of_one(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["window_kv", "noncompressed_lse", "joint_lse", "selected"])
def test_one_process_equals_no_group(group_of_one, backend, source):
    case = inputs.attention_inputs(B=2, S=5, H=HEADS, P=5, K=4)
    sharded = loss_and_gradient(case, slice(None), source, backend, group_of_one)
    for actual, expected in zip(sharded, loss_and_gradient(case, slice(None), source, backend)):
        torch.testing.assert_close(actual, expected)


@needs_kernels
def test_compiles_in_one_graph(group_of_one):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(indexer_ops.distill_loss, fullgraph=True, backend=counter)
    case = inputs.attention_inputs(B=2, S=5, H=HEADS, P=5, K=4)
    scores = case.index_scores.requires_grad_()
    arguments = (scores, case.topk_idxs, case.query, case.pool)
    options = {"scale": 0.3, "noncompressed_lse": case.noncompressed_lse, "head_group": group_of_one}
    loss = compiled(*arguments, backend="triton", **options)
    loss.backward()
    torch.testing.assert_close(loss, indexer_ops.distill_loss(*arguments, backend="triton", **options))
    assert counter.frame_count == 1
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert any("all_reduce" in name for name in names), names
