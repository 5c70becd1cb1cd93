"""A loss attached to an output gives the gradients of a loss that is added, however the backward pass is run."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import indexer_ops
import inputs
from indexer_ops.training import attach_aux_loss, zero_loss

BATCH, COEFFICIENT = 4, 0.3


class Layer(torch.nn.Module):
    """A trunk, and an indexer that learns from its layer's distillation loss only."""

    def __init__(self, scale):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk = torch.nn.Parameter(torch.randn(3, 3, generator=generator))
        self.indexer = torch.nn.Parameter(torch.randn(4, generator=generator))
        self.scale = scale
        self.kl = None

    def forward(self, x, case, rows, row_weight=None):
        self.kl = indexer_ops.distill_loss(
            case.index_scores.detach()[rows] * self.indexer,
            case.topk_idxs[rows],
            case.query[rows],
            case.pool[rows],
            scale=case.scale,
            window_kv=case.window_kv[rows],
            sink=case.sink,
            window=3,
            reduction="valid_mean",
            row_weight=row_weight,
        )
        return attach_aux_loss(x @ self.trunk, self.kl, self.scale)


@pytest.fixture
def case():
    return inputs.attention_inputs(B=BATCH, S=6, H=2, P=5, K=4)


@pytest.fixture
def x():
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(layer):
    return layer.trunk.grad.clone(), layer.indexer.grad.clone()


def added_explicitly(case, x):
    layer = Layer(torch.tensor(0.0))
    main = layer(x, case, slice(None)).square().mean()
    (main + COEFFICIENT * layer.kl).backward()
    return gradients(layer)


@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "grad_scaler"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_are_one_large_batch(case, x, micro_batches, is_scaled):
    # Rows of the samples must count alike: with empty rows, a mean of means weighs them differently.
    case.topk_idxs[:, :, 0] = 0
    layer = Layer(torch.zeros(()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    scaler.scale(torch.ones(()))  # makes the scale
    size = BATCH // micro_batches
    losses = []
    for first in range(0, BATCH, size):  # all forward passes before any backward, as a pipeline may
        rows = slice(first, first + size)
        losses.append(layer(x[rows], case, rows).square().mean() / micro_batches)
    layer.scale.fill_(COEFFICIENT / micro_batches * scaler.get_scale())
    for loss in losses:
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(layer), added_explicitly(case, x))


def test_a_mask_is_the_batch_without_its_padding(case, x):
    unpadded = 4
    whole, short = Layer(COEFFICIENT), Layer(COEFFICIENT)
    row_weight = (torch.arange(6) < unpadded).expand(BATCH, 6)
    whole(x, case, slice(None), row_weight).sum().backward()
    names = ("index_scores", "topk_idxs", "query", "window_kv")
    shorter = type("Case", (), {**vars(case), **{n: getattr(case, n).detach()[:, :unpadded] for n in names}})
    short(x, shorter, slice(None)).sum().backward()
    torch.testing.assert_close(gradients(whole), gradients(short))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(case, x, use_reentrant):
    layer = Layer(torch.tensor(COEFFICIENT))
    output = checkpoint(layer, x, case, slice(None), use_reentrant=use_reentrant)
    kl = layer.kl.detach().clone()
    output.square().mean().backward()
    plain = Layer(torch.tensor(0.0))
    plain(x, case, slice(None))
    assert torch.equal(kl, plain.kl)
    torch.testing.assert_close(gradients(layer), added_explicitly(case, x))


def attach_scaled(x, weight, scale):
    return attach_aux_loss(x * 2, weight.square().sum(), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_without_a_break(dtype):
    weight, x = (torch.randn(4, requires_grad=True) for _ in range(2))
    compiled = torch.compile(attach_scaled, fullgraph=True, backend="aot_eager")
    scale = torch.tensor(3.0, dtype=dtype)
    output = compiled(x, weight, scale)
    assert torch.equal(output, x * 2)
    output.sum().backward()
    torch.testing.assert_close(weight.grad, 6 * weight.detach())
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiled_graph_never_uses_a_stale_scale(dtype):
    weight, x = (torch.randn(4, requires_grad=True) for _ in range(2))
    scale = torch.tensor(3.0, dtype=dtype)
    output = torch.compile(attach_scaled, fullgraph=True, backend="aot_eager")(x, weight, scale)
    scale.fill_(5.0)
    output.sum().backward()
    torch.testing.assert_close(weight.grad, 10 * weight.detach())


def test_output_is_unchanged_and_learns_even_if_frozen():
    output, weight = torch.randn(3), torch.ones((), requires_grad=True)
    attached = attach_aux_loss(output, weight * 2, 0.5)
    assert torch.equal(attached, output) and attached.data_ptr() == output.data_ptr()
    attached.sum().backward()
    assert weight.grad == 1.0


def test_scale_of_another_shape_and_dtype():
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    attach_aux_loss(torch.ones(2, dtype=torch.bfloat16), weight, torch.tensor([[0.25]])).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        (ValueError, {"scale": float("nan")}),
        (ValueError, {"scale": float("inf")}),
        (ValueError, {"scale": torch.ones(2)}),
        (TypeError, {"scale": "1"}),
        (TypeError, {"scale": True}),
        (ValueError, {"loss": torch.ones(2)}),
        (TypeError, {"loss": 1.0}),
        (TypeError, {"output": torch.ones(2, dtype=torch.int64)}),
    ],
)
def test_bad_inputs(error, changed):
    (name,) = changed
    with pytest.raises(error, match=f"^{name} must"):
        attach_aux_loss(**{"output": torch.ones(2), "loss": torch.ones(()), "scale": 1.0, **changed})


def test_zero_loss_gives_zeros_and_saves_nothing():
    weight, frozen = torch.randn(3, requires_grad=True), torch.randn(2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = zero_loss([weight, frozen])
    loss.backward()
    assert loss.item() == 0 and not saved
    assert torch.equal(weight.grad, torch.zeros(3)) and frozen.grad is None
    with pytest.raises(ValueError, match="parameters must"):
        zero_loss([])
