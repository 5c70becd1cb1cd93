"""The loss on and off: no work where there is none to do, models put back, copied, saved and compiled; bad input."""

import copy
import io
import math

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DeepseekV4ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from indexer_ops import distill_loss
from indexer_ops.integrations.transformers import enable_indexer_distillation, training_pass
from small_deepseek_v4 import (
    CACHE,
    CHECKPOINTING,
    CSA,
    HCA,
    assert_bitwise_equal,
    checkpoint_layers,
    deepseek_v4,
    gradients,
    indexer_parameters,
    masked_case,
    small_model,
    tokens,
)


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def forbid_the_loss(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the loss was computed")

    monkeypatch.setattr(training_pass, "distill_loss", fail)


def count_saved_tensors(run):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(1) or tensor, lambda tensor: tensor):
        run()
    return len(saved)


def test_eval_and_no_grad_compute_nothing(model, forbid_the_loss):
    ids = tokens()
    model.eval()
    expected = model(ids, labels=ids)
    handle = enable_indexer_distillation(model)
    outputs = model(ids, labels=ids)
    assert torch.equal(outputs.loss, expected.loss) and torch.equal(outputs.logits, expected.logits)
    assert handle.loss is None and handle.per_layer == {}
    model.train()
    with torch.no_grad():
        model(ids, labels=ids)
    assert handle.loss is None and handle.per_layer == {}
    assert model.generate(ids[:, :8], max_new_tokens=6, do_sample=False).shape[1] <= 14  # in training mode, cached


@CHECKPOINTING
def test_coefficient_zero_leaves_gradients_of_zeros(model, forbid_the_loss, use_reentrant):
    ids = tokens()
    checkpoint_layers(model, use_reentrant)
    plain = model(ids, labels=ids)
    plain.loss.backward()
    without = gradients(model)
    model.zero_grad()
    saved = count_saved_tensors(lambda: model(ids, labels=ids))
    handle = enable_indexer_distillation(model, coeff=0)
    assert count_saved_tensors(lambda: model(ids, labels=ids)) == saved
    outputs = model(ids, labels=ids)
    assert torch.equal(outputs.loss, plain.loss)
    assert handle.loss == 0 and handle.per_layer == {}
    outputs.loss.backward()
    for name in indexer_parameters(model):
        assert without.pop(name) is None
        assert not model.get_parameter(name).grad.any(), name
    assert_bitwise_equal({name: model.get_parameter(name).grad for name in without}, without)


def test_a_fresh_cache_changes_nothing_and_a_filled_one_computes_nothing(model):
    ids = tokens()
    handle = enable_indexer_distillation(model)
    model(ids, use_cache=False)
    expected = handle.per_layer
    outputs = model(ids, use_cache=True)
    assert handle.per_layer == expected
    model(ids[:, :4], **{CACHE: outputs[CACHE]})
    assert handle.per_layer == {} and handle.loss == 0
    handle.loss.backward()
    assert all(not p.grad.any() for p in indexer_parameters(model).values())


def keep_own_gradients(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("coeff", [0.0, 1e-2])
def test_distributed_data_parallel_finds_every_parameter_used(model, coeff):
    enable_indexer_distillation(model, coeff=coeff)
    # No gloo: its group, destroyed with the last reference to it, waits for a thread that waits for the interpreter.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel.register_comm_hook(None, keep_own_gradients)
        for _ in range(2):  # the second forward pass raises if a parameter got no gradient in the first
            parallel(tokens(), labels=tokens()).loss.backward()
    finally:
        torch.distributed.destroy_process_group()


# --- On, off, copied, saved, compiled -----------------------------------------------------------------------------


def test_disable_puts_the_model_back_exactly(model):
    ids = tokens()
    config, state = model.config.to_dict(), [dict(vars(module)) for module in model.modules()]
    hooks = [{name: dict(value) for name, value in vars(m).items() if "hooks" in name} for m in model.modules()]
    model(ids, labels=ids).loss.backward()
    before, _ = gradients(model), model.zero_grad()
    handle = enable_indexer_distillation(model)
    assert model.config.to_dict() == config
    model(ids, labels=ids).loss.backward()
    model.zero_grad()
    handle.disable()
    handle.disable()
    assert handle.loss is None and handle.per_layer == {}
    for module, attributes, hooked in zip(model.modules(), state, hooks, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert all(dict(vars(module)[name]) == value for name, value in hooked.items())
    model(ids, labels=ids).loss.backward()
    assert_bitwise_equal(gradients(model), before)
    enable_indexer_distillation(model).disable()


def test_save_and_load_while_it_is_on(model, tmp_path):
    ids = tokens()
    model.save_pretrained(tmp_path / "off")
    handle = enable_indexer_distillation(model, coeff=0.5)
    loss = model(ids, labels=ids).loss
    model.save_pretrained(tmp_path / "on")
    names = sorted(path.name for path in (tmp_path / "off").iterdir())
    assert sorted(path.name for path in (tmp_path / "on").iterdir()) == names
    for name in names:
        assert (tmp_path / "on" / name).read_bytes() == (tmp_path / "off" / name).read_bytes(), name
    loaded = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "on").train()
    again = enable_indexer_distillation(loaded, coeff=0.5)
    assert torch.equal(loaded(ids, labels=ids).loss, loss) and again.per_layer == handle.per_layer


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_a_copy_has_a_handle_of_its_own(model, through):
    ids = tokens()
    handle = enable_indexer_distillation(model, coeff=0.5)
    loss = model(ids, labels=ids).loss
    kept = handle.loss
    if through == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    twin_handle = twin.model.indexer_distillation
    assert twin_handle is not handle and twin_handle.loss is None
    assert torch.equal(twin(ids, labels=ids).loss, loss)
    twin_handle.coeff = 0.0
    assert handle.loss is kept and handle.coeff == 0.5
    twin_handle.disable()
    assert all(module.config is twin.config for module in twin.modules() if hasattr(module, "config"))
    assert torch.equal(model(ids, labels=ids).loss, loss)


def test_the_attention_function_of_the_model_stays_in_use(model):
    calls = []

    def counted(module, *args, **kwargs):
        calls.append(module.layer_idx)
        return deepseek_v4.eager_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("counted_for_test", counted)
    AttentionMaskInterface.register("counted_for_test", eager_mask)
    try:
        handle = enable_indexer_distillation(model)
        model(tokens())
        expected = handle.per_layer
        model.config._attn_implementation = "counted_for_test"
        model(tokens())
    finally:
        del AttentionInterface._global_mapping["counted_for_test"]
        del AttentionMaskInterface._global_mapping["counted_for_test"]
    assert calls == [0, 1, 2] and handle.per_layer == expected


@pytest.mark.parametrize("use_reentrant", [None, False], ids=["plain", "non_reentrant"])
def test_whole_model_compiles_without_a_break(use_reentrant):
    model = small_model((CSA,))
    model.set_experts_implementation("batched_mm")  # with its default, transformers 5.17 cannot be compiled on a CPU
    checkpoint_layers(model, use_reentrant)
    handle = enable_indexer_distillation(model, coeff=0.5)
    batch = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    batch["attention_mask"] = masked_case("right_padding").inputs["attention_mask"]
    loss = model(**batch).loss
    loss.backward()
    expected, per_layer = gradients(model), handle.per_layer
    model.zero_grad()
    torch._dynamo.reset()
    # A checkpointed layer reports its loss in its first pass only, to which Dynamo has to be told not to object.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compiled_loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).loss
        compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(handle.per_layer, per_layer, rtol=1e-5, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_autocast(model, monkeypatch):
    def with_one_dtype(scores, topk_idxs, query, pool, *, window_kv, **options):
        assert pool.dtype == window_kv.dtype == query.dtype  # else no fused op would serve it
        return distill_loss(scores, topk_idxs, query, pool, window_kv=window_kv, **options)

    monkeypatch.setattr(training_pass, "distill_loss", with_one_dtype)
    ids = tokens()
    handle = enable_indexer_distillation(model)
    model(ids)
    exact = handle.loss
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(ids, labels=ids)
    assert handle.loss.dtype == torch.float32
    torch.testing.assert_close(handle.loss, exact, rtol=0.25, atol=0)
    outputs.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in indexer_parameters(model).values())


def test_importing_the_package_does_not_import_transformers(fresh_process):
    assert fresh_process("import sys, indexer_ops; print('transformers' in sys.modules)").strip() == "False"


# --- Bad input ----------------------------------------------------------------------------------------------------


def test_bad_models():
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for not_a_model in (llama, torch.nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=f"model must be .*DeepseekV4ForCausalLM.*got {type(not_a_model).__name__}"):
            enable_indexer_distillation(not_a_model)
    with pytest.raises(TypeError, match="got DataParallel"):
        enable_indexer_distillation(torch.nn.DataParallel(small_model((CSA,))))
    with pytest.raises(ValueError, match="at least one compressed_sparse_attention layer.*heavily_compressed"):
        enable_indexer_distillation(small_model((HCA,)))


def test_replicas_of_data_parallel_raise(model):
    enable_indexer_distillation(model)
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        model.model._replicate_for_data_parallel()(tokens())


@pytest.mark.parametrize(
    ("coeff", "error", "message"),
    [
        (-1e-3, ValueError, "at least 0, got -0.001"),
        (math.nan, ValueError, "finite.*got nan"),
        (math.inf, ValueError, "finite.*got inf"),
        ("0.1", TypeError, "a number, got str"),
        (None, TypeError, "a number, got NoneType"),
        (True, TypeError, "a number, got bool"),
    ],
)
def test_bad_coefficients_change_nothing(model, coeff, error, message):
    state = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(error, match=f"coeff must be .*{message}"):
        enable_indexer_distillation(model, coeff)
    assert [dict(vars(module)) for module in model.modules()] == state
    handle = enable_indexer_distillation(model, 0.25)
    with pytest.raises(error, match=f"coeff must be .*{message}"):
        handle.coeff = coeff
    assert handle.coeff == 0.25


def test_enabling_twice_raises(model):
    handle = enable_indexer_distillation(model)
    for again in (model, model.model):
        with pytest.raises(ValueError, match="on already"):
            enable_indexer_distillation(again)
    handle.disable()
    enable_indexer_distillation(model.model)
