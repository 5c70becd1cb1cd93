"""Indexer and loss in CUDA graphs: captured by hand, and by torch.compile(mode="reduce-overhead")."""

import pytest
import torch

import indexer_ops

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def layer_operands(seed=0, S=256, P=64):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()

    learning = [normal(1, S, 16, 128), normal(1, P, 128), normal(1, S, 16).float()]
    teacher = [normal(1, S, 8, 128), normal(1, P, 128), normal(1, S, 128)]
    return [tensor.requires_grad_() for tensor in learning], teacher


def indexer_and_loss(q, k, weights, query, pool, window_kv):
    scores, idxs = indexer_ops.indexer_topk(q, k, weights, topk=32, ratio=4)
    return indexer_ops.distill_loss(
        scores, idxs, query, pool, scale=128**-0.5, window_kv=window_kv, window=64, reduction="valid_mean"
    )


def loss_and_gradients(function, learning, teacher):
    loss = function(*learning, *teacher)
    return [loss.detach().clone(), *(grad.clone() for grad in torch.autograd.grad(loss, learning))]


@pytest.fixture(autouse=True)
def deterministic():
    """So that the gradient of the keys, too, can be compared bit by bit."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def test_cuda_graph_capture_after_one_warm_up():
    learning, teacher = layer_operands()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = loss_and_gradients(indexer_and_loss, learning, teacher)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = loss_and_gradients(indexer_and_loss, learning, teacher)
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(captured, expected):
        assert wanted.any() and torch.equal(actual, wanted)


def test_reduce_overhead_gives_identical_results():
    compiled = torch.compile(indexer_and_loss, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # two calls warm up and record, the rest replay
        learning, teacher = layer_operands(seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual = loss_and_gradients(compiled, learning, teacher)
        expected = loss_and_gradients(indexer_and_loss, learning, teacher)
        # The mean over rows is a sum that Inductor may take in another order; all else is the same kernels.
        for got, wanted in zip(actual, expected):
            assert wanted.any()
            torch.testing.assert_close(got, wanted)
