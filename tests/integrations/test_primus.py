"""The Primus drop-in against the float64 oracle: its layouts, switches and scaling."""

import itertools
import math

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import indexer_ops
import inputs
import oracle
from indexer_ops.integrations import primus

SWITCHES = ("NONCOMP_LSE", "WINDOW_TRITON", "TARGET_TRITON", "KL_TRITON")
WINDOW, COEFFICIENT = 3, 0.25


def primus_case(B=2, S=6, H=3, **sizes):
    """Operands in Primus' layout: empty slots score ``-inf``, heads before rows, one window key set for all heads."""
    case = inputs.attention_inputs(B=B, S=S, H=H, **sizes)
    scores = case.index_scores.masked_fill(case.topk_idxs < 0, -math.inf)
    return {
        "index_topk_scores": scores.requires_grad_(),
        "topk_idxs": case.topk_idxs,
        "query": case.query.transpose(1, 2).contiguous(),
        "pool": case.pool,
        "softmax_scale": case.scale,
        "loss_coeff": COEFFICIENT,
        "k_local": case.window_kv.unsqueeze(1).expand(B, H, S, -1),
        "sink": case.sink,
        "swa_window": WINDOW,
    }


def loss_and_gradient(arguments):
    loss = primus.compute_indexer_distill_loss(**arguments)
    (gradient,) = torch.autograd.grad(loss, arguments["index_topk_scores"])
    return loss.detach(), gradient


def expected_loss_and_gradient(arguments, joint=True):
    scores, topk_idxs, scale = (arguments[name] for name in ("index_topk_scores", "topk_idxs", "softmax_scale"))
    query, pool = arguments["query"].transpose(1, 2), arguments["pool"]
    lse = None
    if joint:
        keys = arguments["k_local"].transpose(1, 2)
        lse = oracle.window_lse(query, keys, arguments["sink"], None, arguments["swa_window"], scale)
    target = oracle.distill_target(query, pool, topk_idxs, lse, None, scale)
    kl = oracle.distill_kl(scores, target, topk_idxs)
    slope = torch.full_like(kl, arguments["loss_coeff"] / kl.numel())
    gradient = oracle.distill_kl_gradient(slope, scores, target, topk_idxs)
    return (arguments["loss_coeff"] * kl.mean()).float(), gradient.float()


def assert_equal_to_oracle(arguments, **options):
    for actual, expected in zip(loss_and_gradient(arguments), expected_loss_and_gradient(arguments, **options)):
        torch.testing.assert_close(actual.cpu(), expected)


@pytest.fixture
def switch(monkeypatch):
    for name in SWITCHES:
        monkeypatch.delenv(f"PRIMUS_V4_DISTILL_{name}", raising=False)
    return lambda name, value: monkeypatch.setenv(f"PRIMUS_V4_DISTILL_{name}", value)


@pytest.fixture
def calls(monkeypatch):
    """Name to keyword and positional arguments of each call that reaches ``indexer_ops.api``."""
    seen = {}
    for name in ("window_lse", "distill_target", "distill_kl", "distill_loss"):

        def record(*args, _name=name, _function=getattr(indexer_ops.api, name), **kwargs):
            seen[_name] = (args, kwargs)
            return _function(*args, **kwargs)

        monkeypatch.setattr(primus.api, name, record)
    return seen


# --- Values and layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swa_window", [0, WINDOW])
def test_shared_keys(switch, swa_window):
    assert_equal_to_oracle(primus_case() | {"swa_window": swa_window})


def test_keys_of_each_head(switch):
    arguments = primus_case()
    arguments["k_local"] = torch.randn(arguments["k_local"].shape, generator=torch.Generator().manual_seed(1)).to(
        arguments["query"]
    )
    assert_equal_to_oracle(arguments)


def test_without_sink(switch):
    assert_equal_to_oracle(primus_case() | {"sink": None})


def test_without_window_keys_the_sink_takes_no_part(switch):
    assert_equal_to_oracle(primus_case() | {"k_local": None}, joint=False)


def test_heads_that_follow_rows_in_memory(switch):
    arguments = primus_case()
    arguments["query"] = arguments["query"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal_to_oracle(arguments)


def test_rows_without_an_entry_count_in_the_mean(switch):
    arguments = primus_case()
    arguments["topk_idxs"][:, :3] = -1
    arguments["index_topk_scores"].data[:, :3] = -math.inf
    assert_equal_to_oracle(arguments)
    assert torch.count_nonzero(loss_and_gradient(arguments)[1][:, :3]) == 0


def test_noncompressed_lse(switch):
    arguments = primus_case()
    names = ("query", "k_local", "sink", "swa_window", "softmax_scale")
    lse = primus.noncompressed_lse(**{name: arguments[name] for name in names})
    query, keys = arguments["query"].transpose(1, 2), arguments["k_local"].transpose(1, 2)
    expected = oracle.window_lse(query, keys, arguments["sink"], None, WINDOW, arguments["softmax_scale"])
    torch.testing.assert_close(lse.cpu(), expected.transpose(1, 2).float())


def test_nothing_is_copied(switch, calls):
    arguments = primus_case()
    loss_and_gradient(arguments)
    (query, keys, _), _ = calls["window_lse"]
    B, _, S, D = arguments["query"].shape
    assert keys.shape == (B, S, D), "one set of keys, not one a head"
    assert keys.untyped_storage().data_ptr() == arguments["k_local"].untyped_storage().data_ptr()
    assert query.untyped_storage().data_ptr() == arguments["query"].untyped_storage().data_ptr()


@pytest.mark.parametrize("heads", [2, 4])
def test_keys_of_another_number_of_heads(heads):
    arguments = primus_case()
    wrong = arguments["k_local"][:, :1].expand(-1, heads, -1, -1)
    with pytest.raises(ValueError, match="k_local"):
        primus.compute_indexer_distill_loss(**arguments | {"k_local": wrong})


@pytest.mark.parametrize("name", ["query", "k_local"])
def test_another_rank(name):
    arguments = primus_case()
    with pytest.raises(ValueError, match=name):
        primus.compute_indexer_distill_loss(**arguments | {name: arguments[name][0]})


# --- Switches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", list(itertools.product("01", repeat=len(SWITCHES))))
def test_switches(switch, calls, values):
    for name, value in zip(SWITCHES, values):
        switch(name, value)
    joint, window, target, kl = (value == "1" for value in values)
    assert_equal_to_oracle(primus_case(), joint=joint)
    backend = {True: "auto", False: "composite"}
    expected = {"distill_loss": backend[kl]}
    if target != kl:
        expected = {"distill_target": backend[target], "distill_kl": backend[kl]}
    if joint:
        expected["window_lse"] = backend[window]
    assert {name: keywords["backend"] for name, (_, keywords) in calls.items()} == expected


@pytest.mark.parametrize("target", ["0", "1"])
def test_no_rows(switch, target):
    switch("TARGET_TRITON", target)
    loss, gradient = loss_and_gradient(primus_case(S=0))
    assert (loss.item(), gradient.shape) == (0.0, (2, 0, 4))


def test_switches_are_read_at_every_call(switch):
    arguments = primus_case()
    joint = loss_and_gradient(arguments)[0]
    switch("NONCOMP_LSE", "0")
    selected_only = loss_and_gradient(arguments)[0]
    switch("NONCOMP_LSE", "1")
    assert loss_and_gradient(arguments)[0] == joint != selected_only


# --- Coefficient --------------------------------------------------------------------------------------------------


def test_coefficient_0_calls_nothing_and_gives_zeros(switch, calls):
    arguments = primus_case() | {"loss_coeff": 0.0}
    loss = primus.compute_indexer_distill_loss(**arguments)
    assert (loss.item(), loss.dtype, loss.shape) == (0.0, torch.float32, ())
    loss.backward()
    gradient = arguments["index_topk_scores"].grad
    torch.testing.assert_close(gradient, torch.zeros_like(arguments["index_topk_scores"]), rtol=0, atol=0)
    assert calls == {}


@pytest.mark.parametrize("coefficient", [-1e-2, math.nan, math.inf])
def test_bad_coefficient(coefficient):
    with pytest.raises(ValueError, match="loss_coeff"):
        primus.compute_indexer_distill_loss(**primus_case() | {"loss_coeff": coefficient})


# --- Sharded heads ------------------------------------------------------------------------------------------------

HEADS = 5  # odd: the ranks hold different counts


def compare_with_unsharded(rank, world_size, store):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    mine = slice(HEADS * rank // world_size, HEADS * (rank + 1) // world_size)
    with pytest.MonkeyPatch.context() as patch:
        for target, kl, joint in ("111", "010", "100", "001"):
            patch.setenv("PRIMUS_V4_DISTILL_TARGET_TRITON", target)
            patch.setenv("PRIMUS_V4_DISTILL_KL_TRITON", kl)
            patch.setenv("PRIMUS_V4_DISTILL_NONCOMP_LSE", joint)
            whole = primus_case(H=HEADS)
            shard = whole | {name: whole[name][:, mine] for name in ("query", "k_local")}
            shard["sink"] = whole["sink"][mine]
            sharded = loss_and_gradient(shard | {"head_reduce_group": torch.distributed.group.WORLD})
            for actual, expected in zip(sharded, loss_and_gradient(whole)):
                torch.testing.assert_close(actual, expected)
            alone, _ = loss_and_gradient(shard)
            assert not torch.allclose(alone, sharded[0], rtol=1e-3), "one shard alone must not be enough"
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(inputs.DEVICE != "cpu", reason="gloo sums on the CPU")
def test_heads_sharded_over_two_processes(tmp_path):
    torch.multiprocessing.spawn(compare_with_unsharded, (2, str(tmp_path / "store")), nprocs=2)


# --- Attaching ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scaler():
    yield primus.V4IndexerLossAutoScaler
    primus.V4IndexerLossAutoScaler.set_loss_scale(None)


def test_attached_loss_gets_the_scale_of_the_time_of_backward(scaler):
    output = torch.ones(2, 3, requires_grad=True)
    parameter = torch.ones(4, requires_grad=True)
    attached = scaler.apply(output, 2 * parameter.sum())
    torch.testing.assert_close(attached, output, rtol=0, atol=0)
    scaler.set_loss_scale(torch.tensor([0.25]))
    (3 * attached).sum().backward()
    torch.testing.assert_close(output.grad, torch.full_like(output, 3.0))
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.5))


def test_scale_takes_dtype_and_device_of_the_loss(scaler):
    scaler.set_loss_scale(torch.tensor(2.0))
    scale = scaler.current_loss_scale(torch.zeros((), dtype=torch.bfloat16))
    assert (scale.item(), scale.dtype) == (2.0, torch.bfloat16)


def test_without_megatron_the_scale_is_1(fresh_process):
    code = """
import torch
from indexer_ops.integrations.primus import V4IndexerLossAutoScaler
parameter = torch.ones(3, requires_grad=True)
V4IndexerLossAutoScaler.apply(torch.ones(2, requires_grad=True), parameter.sum()).sum().backward()
print(parameter.grad.tolist())
"""
    assert fresh_process(code, hidden=("megatron",)).strip() == "[1.0, 1.0, 1.0]"
