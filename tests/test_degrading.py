"""A kernel that cannot be had: one warning, then the reference; an error where the kernel was asked for by name."""

import warnings

import pytest
import torch

import inputs
from backends import DEVICE, needs_kernels
from indexer_ops import _ops, dispatch, reference

pytestmark = needs_kernels
PRIVATE = torch.ops.v4idx


def calls(**sizes):
    """For each launcher: the private op, its arguments but ``strict``, the reference."""
    case = inputs.attention_inputs(**sizes)
    target = inputs.target_of(case.topk_idxs)
    scores = (case.index_scores, target, case.topk_idxs)
    return {
        "window_lse": (
            PRIVATE._window_lse, (case.query, case.window_kv, case.sink, None, 2, 0.3, 0), reference.window_lse,
        ),
        "distill_target": (
            PRIVATE._distill_target,
            (case.query, case.pool, case.topk_idxs, case.noncompressed_lse, None, 0.3, True),
            reference.distill_target,
        ),
        "distill_kl": (PRIVATE._distill_kl, (*scores, 1e-10), reference.distill_kl),
        "distill_kl_backward": (
            PRIVATE._distill_kl_backward, (case.grad_kl, *scores, 1e-10), reference.distill_kl_backward,
        ),
        "distill_loss": (
            PRIVATE._distill_loss,
            (
                case.index_scores, case.topk_idxs, case.query, case.pool, case.noncompressed_lse, None, 0.3, 1e-10,
            ),
            reference.distill_loss_and_gradient,
        ),
        "distill_loss_backward": (
            PRIVATE._distill_loss_backward,
            (case.grad_kl, case.index_scores, case.index_scores.half()),
            lambda grad_kl, gradient, index_scores: reference.scaled_rows(grad_kl, gradient, index_scores.dtype),
        ),
    }  # fmt: skip


LAUNCHERS = (
    "window_lse", "distill_target", "distill_kl", "distill_kl_backward", "distill_loss", "distill_loss_backward",
)  # fmt: skip


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture(params=["import", "compile"])
def broken_kernels(request, monkeypatch):
    """Every kernel fails to import, or to launch; yields how often one was tried."""
    tries = []

    class FailsToCompile:
        def __getattr__(self, launcher):
            def launch(*arguments):
                tries.append(launcher)
                raise RuntimeError("PassManager::run failed")

            return launch

    def import_module(name):
        if request.param == "compile":
            return FailsToCompile()
        tries.append(name)
        raise ImportError("libtriton.so: cannot open shared object file")

    monkeypatch.setattr(_ops, "import_module", import_module)
    monkeypatch.setattr(_ops, "_UNAVAILABLE", {})
    return tries


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_degrades_with_one_warning(broken_kernels, launcher):
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sizes in ({}, {}, {"K": 3, "H": 2, "D": 32}, {"S": 4}):
            op, arguments, fallback = calls(**sizes)[launcher]
            assert_same(op(*arguments, False), fallback(*arguments))
    ours = [str(warning.message) for warning in caught if "v4idx" in str(warning.message)]
    assert len(ours) == 1, ours
    named = launcher.removesuffix("_backward")
    assert f"v4idx::{named}" in ours[0] and device in ours[0]
    assert "libtriton.so: cannot open" in ours[0] or "PassManager::run failed" in ours[0]
    assert len(broken_kernels) <= 3, "a call of the same widths must not try again"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_strict_raises_the_cause(broken_kernels, launcher):
    op, arguments, _ = calls()[launcher]
    for _ in range(2):
        with pytest.raises((ImportError, RuntimeError), match="cannot open shared object|PassManager::run failed"):
            op(*arguments, True)


def test_strict_raises_after_a_degraded_call(broken_kernels):
    op, arguments, fallback = calls()["distill_kl"]
    with pytest.warns(UserWarning, match="v4idx::distill_kl runs its slow reference"):
        op(*arguments, False)
    with pytest.raises((ImportError, RuntimeError)):
        op(*arguments, True)


def test_gradient_of_a_degraded_op(broken_kernels):
    case = inputs.attention_inputs()
    target = inputs.target_of(case.topk_idxs)
    scores = case.index_scores.requires_grad_()
    with pytest.warns(UserWarning, match="slow reference"):
        kl = PRIVATE._distill_kl(scores, target, case.topk_idxs, 1e-10, False)
        (gradient,) = torch.autograd.grad(kl, scores, case.grad_kl)
    expected = reference.distill_kl_backward(case.grad_kl, scores, target, case.topk_idxs, 1e-10)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_switched_off(monkeypatch, launcher):
    op, arguments, fallback = calls()[launcher]
    monkeypatch.setattr(dispatch, "SWITCHED_OFF", frozenset(dispatch.OPS))
    monkeypatch.setattr(_ops, "import_module", lambda name: pytest.fail("a switched-off op imported its kernel"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its user asked for it: no warning
        assert_same(op(*arguments, False), fallback(*arguments))
    named = launcher.removesuffix("_backward")
    with pytest.raises(NotImplementedError, match=f"{named}.*V4IDX_BACKEND or V4IDX_DISABLE"):
        op(*arguments, True)


def test_out_of_memory_is_no_reason_to_degrade(monkeypatch):
    def import_module(name):
        raise torch.OutOfMemoryError("tried to allocate 64 GiB")

    monkeypatch.setattr(_ops, "import_module", import_module)
    op, arguments, _ = calls()["distill_kl"]
    with pytest.raises(torch.OutOfMemoryError):
        op(*arguments, False)
