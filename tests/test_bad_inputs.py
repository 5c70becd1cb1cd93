"""Bad input raises TypeError or ValueError that names the argument, what came and what is expected."""

import pytest
import torch

import indexer_ops
import inputs
from backends import DEVICE
from indexer_ops import reference

# B, S, H, D, T, P, K all differ, so that no wrong size is right by accident.
SIZES = {"B": 2, "S": 6, "H": 3, "D": 16, "T": 7, "P": 5, "K": 4}
OPS = ("window_lse", "distill_target", "distill_kl", "distill_loss")


def arguments_of(op):
    case = inputs.attention_inputs(**SIZES)
    if op == "window_lse":
        doc_start = torch.zeros(2, 6, dtype=torch.int32, device=DEVICE)
        return dict(
            query=case.query, window_kv=case.window_kv, sink=case.sink, doc_start=doc_start, window=3, scale=0.3
        )
    if op == "distill_target":
        lse = case.noncompressed_lse
        return dict(query=case.query, pool=case.pool, topk_idxs=case.topk_idxs, noncompressed_lse=lse, scale=0.3)
    if op == "distill_kl":
        target = inputs.target_of(case.topk_idxs)
        return dict(index_scores=case.index_scores, target=target, topk_idxs=case.topk_idxs)
    return dict(
        index_scores=case.index_scores, topk_idxs=case.topk_idxs, query=case.query, pool=case.pool,
        window_kv=case.window_kv, sink=case.sink, window=3, scale=0.3,
    )  # fmt: skip


def first_number(tensor):
    return tensor.flatten()[0]


def without_last(dim):
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] - 1)


def elsewhere(tensor):
    return tensor.to("meta")


def replaced_by(value):
    return lambda _: value


LAYOUTS = {
    "query": r"\[B, S, H, D\]",
    "window_kv": r"\[B, T, D\] or \[B, T, H, D\]",
    "pool": r"\[B, P, D\]",
    "topk_idxs": r"\[B, S, K\]",
    "index_scores": r"\[B, S, K\]",
    "target": r"\[B, S, K\]",
    "noncompressed_lse": r"\[B, S, H\]",
    "sink": r"\[H\]",
    "doc_start": r"\[B, S\]",
}
TENSORS = {
    "window_lse": ("query", "window_kv", "sink", "doc_start"),
    "distill_target": ("query", "pool", "topk_idxs", "noncompressed_lse"),
    "distill_kl": ("index_scores", "target", "topk_idxs"),
    "distill_loss": ("index_scores", "topk_idxs", "query", "pool", "window_kv", "sink"),
}
OPS_AND_TENSORS = [(op, name) for op in OPS for name in TENSORS[op]]


def expect(error, message, op, name, change, **options):
    arguments = arguments_of(op)
    assert getattr(indexer_ops, op)(**arguments).isfinite().all(), "the arguments are right before the change"
    arguments[name] = change(arguments.get(name))
    with pytest.raises(error, match=message) as caught:
        getattr(indexer_ops, op)(**arguments, **options)
    assert type(caught.value) is error, "a subclass would be something else going wrong"


@pytest.mark.parametrize("op, name", OPS_AND_TENSORS)
def test_no_tensor(op, name):
    expect(TypeError, rf"{name} must be a torch\.Tensor.*got list", op, name, replaced_by([1.0]))


@pytest.mark.parametrize("op, name", OPS_AND_TENSORS)
@pytest.mark.parametrize("check_inputs", [False, True])
def test_wrong_rank(op, name, check_inputs):
    options = {} if op == "distill_kl" else {"check_inputs": check_inputs}
    message = rf"{name} must be {LAYOUTS[name]}, got torch\.\w+ \[\]"
    expect(ValueError, message, op, name, first_number, **options)


@pytest.mark.parametrize("op, name", OPS_AND_TENSORS)
def test_wrong_kind_of_numbers(op, name):
    if name in ("topk_idxs", "doc_start"):
        message = rf"{name} must be torch\.int32 or torch\.int64, got torch\.float32 \[2, 6"
        expect(TypeError, message, op, name, torch.Tensor.float)
        expect(TypeError, rf"{name} must be .*got torch\.bool", op, name, torch.Tensor.bool)
    elif name == "noncompressed_lse":
        expect(TypeError, rf"{name} must be torch\.float32.*got torch\.bfloat16", op, name, torch.Tensor.bfloat16)
    else:
        message = rf"{name} must be a floating-point tensor, got torch\.int32"
        expect(TypeError, message, op, name, torch.Tensor.int)


@pytest.mark.parametrize("op, name", OPS_AND_TENSORS)
def test_mixed_devices(op, name):
    arguments = arguments_of(op)
    arguments[name] = elsewhere(arguments[name])
    with pytest.raises(ValueError, match=r"on one device: \w+ is on \w+.*, \w+ on \w+") as caught:
        getattr(indexer_ops, op)(**arguments)
    assert name in str(caught.value) and "meta" in str(caught.value)


# T, P and the target's K stand in one tensor only: every size is right.
FREE_SIZES = {
    ("window_lse", "window_kv", 1),
    ("distill_loss", "window_kv", 1),
    ("distill_target", "pool", 1),
    ("distill_loss", "pool", 1),
    ("distill_target", "topk_idxs", 2),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_mismatched_sizes(op, dim):
    for name in TENSORS[op]:
        arguments = arguments_of(op)
        if dim >= arguments[name].dim() or (op, name, dim) in FREE_SIZES:
            continue
        arguments[name] = without_last(dim)(arguments[name])
        message = r"must be [BSHDK] = \d+ \(from \w+\), got torch\.\w+ \[[\d, ]+\]"
        with pytest.raises(ValueError, match=message) as caught:
            getattr(indexer_ops, op)(**arguments)
        blamed, source = str(caught.value).split(".")[0], str(caught.value).split("from ")[1].split(")")[0]
        assert {blamed, source} <= set(arguments), f"{blamed} or {source} is no argument of {op}"


def test_heads_of_window_keys():
    def of_two_heads(keys):
        return keys.unsqueeze(2).expand(2, 7, 2, 16)

    message = r"window_kv\.shape\[2\] must be H = 3 \(from query\), got torch.float32 \[2, 7, 2, 16\]"
    expect(ValueError, message, "window_lse", "window_kv", of_two_heads)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["cuda", "Triton", ""])
def test_unknown_backend(op, backend):
    message = rf"backend must be one of auto, triton, composite, got '{backend}'"
    expect(ValueError, message, op, "backend", replaced_by(backend))


SCALARS = [
    ("window_lse", "window", 1.5),
    ("window_lse", "window", None),
    ("window_lse", "scale", "0.3"),
    ("window_lse", "query_offset", 0.5),
    ("window_lse", "backend", None),
    ("distill_target", "scale", None),
    ("distill_target", "normalize", "yes"),
    ("distill_target", "backend", 1),
    ("distill_kl", "eps", None),
    ("distill_kl", "backend", None),
    ("distill_loss", "eps", "1e-10"),
    ("distill_loss", "scale", None),
    ("distill_loss", "window", 2.5),
    ("distill_loss", "divisor", "8"),
]


@pytest.mark.parametrize("op, name, value", SCALARS)
def test_scalars_of_a_wrong_type(op, name, value):
    arguments = {**arguments_of(op), name: value}
    if name == "divisor":
        arguments["reduction"] = "sum"
    with pytest.raises(TypeError, match=rf"{name} must be .*got ({type(value).__name__}|{value!r})"):
        getattr(indexer_ops, op)(**arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("op", ["window_lse", "distill_target", "distill_loss"])
def test_scale_must_be_finite(op, value):
    expect(ValueError, f"scale must be a finite number, got {value}", op, "scale", replaced_by(value))


@pytest.mark.parametrize("value", [0.0, -1e-10, float("nan"), float("inf")])
@pytest.mark.parametrize("op", ["distill_kl", "distill_loss"])
def test_eps_must_be_positive(op, value):
    message = f"eps must be a finite number greater than 0, got {value}"
    expect(ValueError, message, op, "eps", replaced_by(value))


@pytest.mark.parametrize(
    "sources",
    [("window_kv", "noncompressed_lse"), ("window_kv", "joint_lse"), ("noncompressed_lse", "joint_lse")],
)
def test_one_source_of_the_denominator(sources):
    arguments = arguments_of("distill_loss")
    given = {"window_kv": arguments.pop("window_kv")}
    del arguments["sink"]
    given["noncompressed_lse"] = given["joint_lse"] = inputs.attention_inputs(**SIZES).noncompressed_lse
    with pytest.raises(ValueError, match=rf"at most one of .* got {sources[0]} and {sources[1]}"):
        indexer_ops.distill_loss(**arguments, **{name: given[name] for name in sources})


@pytest.mark.parametrize("name", ["sink", "doc_start"])
def test_window_arguments_without_a_window(name):
    arguments = arguments_of("distill_loss")
    del arguments["window_kv"], arguments["sink"]
    arguments[name] = arguments_of("window_lse")[name]
    with pytest.raises(ValueError, match=f"{name} takes part only with window_kv"):
        indexer_ops.distill_loss(**arguments)


@pytest.mark.parametrize("reduction", ["average", None, 1])
def test_unknown_reduction(reduction):
    message = f"reduction must be one of none, sum, mean, valid_mean, got {reduction!r}"
    expect(ValueError, message, "distill_loss", "reduction", replaced_by(reduction))


@pytest.mark.parametrize("reduction", ["none", "mean", "valid_mean"])
def test_divisor_goes_with_a_sum(reduction):
    message = f"divisor goes with reduction=\"sum\", got reduction='{reduction}'"
    expect(ValueError, message, "distill_loss", "divisor", replaced_by(8), reduction=reduction)


def test_divisor_must_be_a_number():
    expect(
        ValueError,
        "divisor must be finite and not 0, got 0",
        "distill_loss",
        "divisor",
        replaced_by(0),
        reduction="sum",
    )
    expect(ValueError, "divisor must be finite", "distill_loss", "divisor", replaced_by(float("nan")), reduction="sum")
    message = r"divisor must be a number or a scalar tensor, got torch.float32 \[2\]"
    expect(ValueError, message, "distill_loss", "divisor", replaced_by(torch.ones(2)), reduction="sum")


def test_row_weight_must_fit_the_rows():
    message = r"row_weight must be real, \[B, S\] = \[2, 6\], got torch.float32 \[6, 2\]"
    expect(ValueError, message, "distill_loss", "row_weight", replaced_by(torch.ones(6, 2, device=DEVICE)))
    message = "row_weight must be on the device of index_scores, .* on meta"
    expect(ValueError, message, "distill_loss", "row_weight", replaced_by(torch.ones(2, 6, device="meta")))


@pytest.mark.parametrize("op, name", OPS_AND_TENSORS)
def test_nothing_is_computed_before_the_checks_pass(monkeypatch, op, name):
    computed = []
    for formula in ("window_lse", "distill_target", "distill_kl"):
        monkeypatch.setattr(reference, formula, lambda *args, formula=formula: computed.append(formula))
    arguments = arguments_of(op)
    arguments[name] = arguments[name].unsqueeze(0).unsqueeze(0)
    with pytest.raises(ValueError, match=f"{name} must be"):
        getattr(indexer_ops, op)(**arguments, backend="composite")
    assert not computed


@pytest.mark.parametrize("op", ["distill_target", "distill_kl", "distill_loss"])
def test_rows_wider_than_a_program_go_to_the_composite(op):
    """One entry more than the kernels hold: ``auto`` serves it, ``triton`` says why it cannot."""
    arguments = arguments_of(op)
    for name in ("topk_idxs", "index_scores", "target"):
        if name in arguments:
            arguments[name] = arguments[name][..., :1].expand(-1, -1, 8193)
    assert torch.isfinite(getattr(indexer_ops, op)(**arguments)).all()
    with pytest.raises(NotImplementedError, match="at most 8192 entries a row, got 8193"):
        getattr(indexer_ops, op)(**arguments, backend="triton")
