"""The whole loss as one callable, and a compiler backend that keeps its graphs: what compile and export tests share."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import inputs
from indexer_ops import distill_loss


def learning_inputs(**sizes):
    case = inputs.attention_inputs(**sizes)
    case.index_scores.requires_grad_()
    return case


def loss_and_gradient(case, backend, loss=distill_loss):
    """Window, target, KL and the mean; ``loss`` is ``distill_loss`` or a compiled one."""
    value = loss(
        case.index_scores, case.topk_idxs, case.query, case.pool, scale=0.3, window_kv=case.window_kv, sink=case.sink,
        window=3, backend=backend,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(value, case.index_scores)
    return value.detach(), gradient


class LossModule(torch.nn.Module):
    """The same for ``torch.export``, which takes modules."""

    ARGUMENTS = ("index_scores", "topk_idxs", "query", "pool", "window_kv", "sink")

    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, index_scores, topk_idxs, query, pool, window_kv, sink):
        return distill_loss(
            index_scores, topk_idxs, query, pool, scale=0.3, window_kv=window_kv, sink=sink, window=3,
            backend=self.backend,
        )  # fmt: skip


class Graphs:
    """A ``backend`` for ``torch.compile`` that runs its graphs as they are, and keeps them."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(fw_compiler=self._keeper(self.forward), bw_compiler=self._keeper(self.backward))

    @staticmethod
    def _keeper(graphs):
        def keep(graph_module, example_inputs):
            graphs.append(graph_module)
            return make_boxed_func(graph_module.forward)

        return keep


def called(graphs):
    """Names of the functions that the one graph calls, in order."""
    assert len(graphs) == 1, "one graph"
    return [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]


def fused_calls(graphs):
    return "\n".join(name for name in called(graphs) if name.startswith("v4idx"))
