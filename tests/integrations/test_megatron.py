"""The loss in megatron-core's own tracker and auto scaler, and in a stub of the training log that prints from them."""

import importlib.util
import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.checkpoint import checkpoint

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

NAME = "indexer_distill_loss"
LAYERS = 4
# A run with the loss, by the names of its arguments.
RUN = {"model_type": "deepseek_v4", "v4_indexer_distill_loss_coeff": 1e-2}
OTHER_RUNS = (
    {"model_type": "gpt", "v4_indexer_distill_loss_coeff": 1e-2},
    {"v4_indexer_distill_loss_coeff": 1e-2},
    {"model_type": "deepseek_v4", "v4_indexer_distill_loss_coeff": 0.0},
    {"model_type": "deepseek_v4", "v4_indexer_distill_loss_coeff": None},
    {"model_type": "deepseek_v4"},
)


def imported():
    """Megatron takes seconds to import: only the processes and workers that run these tests pay for it."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from indexer_ops.integrations import megatron, primus

    return SimpleNamespace(parallel_state=parallel_state, moe_utils=moe_utils, ours=megatron, primus=primus)


@pytest.fixture(scope="module")
def modules():
    return imported()


@pytest.fixture
def one_rank(modules, tmp_path):
    """A whole model-parallel world of one process, and an empty tracker."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    modules.parallel_state.initialize_model_parallel()
    modules.moe_utils.get_moe_layer_wise_logging_tracker().clear()
    yield modules
    modules.moe_utils.get_moe_layer_wise_logging_tracker().clear()
    modules.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def auto_scaler(modules):
    scaler = modules.moe_utils.MoEAuxLossAutoScaler
    before, scaler.main_loss_backward_scale = scaler.main_loss_backward_scale, None
    yield scaler
    scaler.main_loss_backward_scale = before


class Writer(dict):
    """Takes what TensorBoard would."""

    def add_scalar(self, name, value, iteration):
        self[name, iteration] = float(value)


def config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=LAYERS, hidden_size=8, num_attention_heads=1, num_moe_experts=2, **changes)


def training_module(moe_utils):
    """The part of ``megatron.training.training`` that prints auxiliary losses."""
    module = ModuleType("megatron.training.training")
    module.track_moe_metrics = moe_utils.track_moe_metrics
    return module


def training_log(training, model_config, num_microbatches, iteration=7, writer=None):
    """Stands for ``training_log``: its keywords, ``track_moe_metrics`` found in its module at every call."""
    printed = {}
    training.track_moe_metrics(
        loss_scale=1 / num_microbatches,
        iteration=iteration,
        writer=writer,
        wandb_writer=None,
        total_loss_dict=printed,
        per_layer_logging=False,
        force_initialize=True,
        track_names=["z_loss"],
        num_layers=model_config.num_layers,
        moe_layer_freq=model_config.moe_layer_freq,
        mtp_num_layers=model_config.mtp_num_layers,
        pg_collection=None,
    )
    return {name: float(value) for name, value in printed.items()}


def save_z_loss(moe_utils, model_config):
    slots = model_config.num_layers + (model_config.mtp_num_layers or 0)
    for layer in range(1, slots + 1):
        moe_utils.save_to_aux_losses_tracker("z_loss", torch.tensor(float(layer)), layer, slots)


# --- What is printed ----------------------------------------------------------------------------------------------

CONFIGURATIONS = pytest.mark.parametrize(
    "changes",
    [{}, {"moe_layer_freq": 3}, {"moe_layer_freq": [0, 1, 1, 1]}, {"mtp_num_layers": 1}],
    ids=["all_moe", "every_third", "listed", "multi_token"],
)


@CONFIGURATIONS
@pytest.mark.parametrize("indexer_layers", [(2, 4), (1,), (1, 2, 3, 4)])
def test_mean_over_layers_with_an_indexer(one_rank, changes, indexer_layers):
    model_config = config(**changes)
    training = training_module(one_rank.moe_utils)
    save_z_loss(one_rank.moe_utils, model_config)
    writer_without = Writer()
    without = training_log(training, model_config, num_microbatches=2, writer=writer_without)
    assert set(without) == {"z_loss"}

    assert one_rank.ours.report_in_training_log(training, SimpleNamespace(**RUN))
    losses = {layer: [0.5 * layer, 0.25 * layer] for layer in indexer_layers}
    for microbatch in range(2):
        for layer in indexer_layers:
            loss = torch.tensor(losses[layer][microbatch])
            one_rank.ours.record_indexer_distill_loss(loss, layer, model_config, len(indexer_layers))
    save_z_loss(one_rank.moe_utils, model_config)
    writer = Writer()
    printed = training_log(training, model_config, num_microbatches=2, writer=writer)
    mean = sum(map(sum, losses.values())) / (2 * len(indexer_layers))
    assert printed == {"z_loss": without["z_loss"], NAME: pytest.approx(mean, rel=1e-6)}
    assert writer == writer_without | {(NAME, 7): pytest.approx(mean, rel=1e-6)}
    # The log clears the tracker: the next one starts at 0.
    assert training_log(training, model_config, num_microbatches=2)[NAME] == 0.0


def test_evaluation_and_recomputation_do_not_count(one_rank):
    def layer(hidden_states):
        loss = hidden_states.square().mean()
        one_rank.ours.record_indexer_distill_loss(loss, 1, config(), 1)
        return one_rank.ours.attach_indexer_distill_loss(hidden_states, loss)

    tracker = one_rank.moe_utils.get_moe_layer_wise_logging_tracker()
    with torch.no_grad():
        layer(torch.full((3,), 2.0))
    assert NAME not in tracker
    # Megatron's checkpointing is of this kind: without gradients first, once more in backward.
    checkpoint(layer, torch.full((3,), 2.0, requires_grad=True), use_reentrant=True).sum().backward()
    assert tracker[NAME]["values"].tolist() == [4.0 * LAYERS, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("number, error", [(None, TypeError), (0, ValueError), (-1, ValueError), (5, ValueError)])
def test_layer_without_a_number(one_rank, number, error):
    with pytest.raises(error, match="layer_number"):
        one_rank.ours.record_indexer_distill_loss(torch.tensor(1.0), number, config(), 1)
    with pytest.raises(error, match="layer_number"):
        one_rank.primus.log_indexer_distill_loss(
            torch.tensor(1.0), layer_number=number, num_layers=LAYERS, device=torch.device("cpu")
        )
    assert NAME not in one_rank.moe_utils.get_moe_layer_wise_logging_tracker()


@pytest.mark.parametrize("count, error", [(0, ValueError), (5, ValueError), (2.0, TypeError)])
def test_bad_number_of_indexer_layers(one_rank, count, error):
    with pytest.raises(error, match="num_indexer_layers"):
        one_rank.ours.record_indexer_distill_loss(torch.tensor(1.0), 1, config(), count)


@pytest.mark.parametrize("loss, error", [(torch.ones(2), ValueError), (1.0, TypeError)])
def test_bad_loss(one_rank, loss, error):
    with pytest.raises(error, match="loss must"):
        one_rank.ours.record_indexer_distill_loss(loss, 1, config(), 1)


def test_primus_prints_the_mean_over_all_moe_layers(one_rank):
    for layer, loss in ((1, None), (2, torch.tensor(3.0, dtype=torch.bfloat16)), (3, None), (4, torch.tensor(1.0))):
        one_rank.primus.log_indexer_distill_loss(
            loss, layer_number=layer, num_layers=LAYERS, device=torch.device("cpu")
        )
    training = training_module(one_rank.moe_utils)
    one_rank.ours.report_in_training_log(training, SimpleNamespace(**RUN))
    save_z_loss(one_rank.moe_utils, config())
    assert training_log(training, config(), num_microbatches=1)[NAME] == 1.0


# --- The patch of the training log --------------------------------------------------------------------------------


def test_wraps_once_and_can_be_undone(modules):
    training = training_module(modules.moe_utils)
    original = training.track_moe_metrics
    for _ in range(3):
        assert modules.ours.report_in_training_log(training, SimpleNamespace(**RUN))
        assert training.track_moe_metrics.original is original
    assert not modules.ours.report_in_training_log(training, SimpleNamespace(model_type="gpt"))
    assert training.track_moe_metrics is original


@pytest.mark.parametrize("run", OTHER_RUNS)
def test_other_runs_print_what_they_printed(one_rank, run):
    training = training_module(one_rank.moe_utils)
    save_z_loss(one_rank.moe_utils, config())
    before = training_log(training, config(), num_microbatches=1)
    assert not one_rank.ours.report_in_training_log(training, SimpleNamespace(**run))
    assert training.track_moe_metrics is one_rank.moe_utils.track_moe_metrics
    save_z_loss(one_rank.moe_utils, config())
    assert training_log(training, config(), num_microbatches=1) == before
    assert NAME not in one_rank.moe_utils.get_moe_layer_wise_logging_tracker()


@pytest.mark.parametrize("names", [None, ["z_loss"], ["z_loss", NAME]])
def test_names_that_the_log_gives(one_rank, names):
    training = training_module(one_rank.moe_utils)
    one_rank.ours.report_in_training_log(training, SimpleNamespace(**RUN))
    save_z_loss(one_rank.moe_utils, config())
    given, printed = names and list(names), {}
    # Names in place: loss_scale, iteration, writer, wandb_writer, total_loss_dict, two switches, track_names.
    training.track_moe_metrics(1.0, 1, None, None, printed, False, False, names, LAYERS)
    assert printed.keys() == {"z_loss", NAME}
    assert names == given, "the caller's list stays as it is"


@pytest.mark.parametrize("coefficient", [-1e-2, math.nan, math.inf])
def test_bad_coefficient(modules, coefficient):
    run = RUN | {"v4_indexer_distill_loss_coeff": coefficient}
    training = training_module(modules.moe_utils)
    with pytest.raises(ValueError, match="v4_indexer_distill_loss_coeff"):
        modules.ours.report_in_training_log(training, SimpleNamespace(**run))
    assert training.track_moe_metrics is modules.moe_utils.track_moe_metrics


def test_another_training_log(modules):
    with pytest.raises(NotImplementedError, match="track_moe_metrics"):
        modules.ours.report_in_training_log(ModuleType("training"), SimpleNamespace(**RUN))


# --- Several ranks ------------------------------------------------------------------------------------------------


def print_on_two_ranks(rank, store):
    """First as two pipeline stages, of which only the first has indexers, then as two data-parallel ranks."""
    modules = imported()
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
    for stages, expected in ((2, 2.0), (1, 2.5)):
        modules.parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
        modules.moe_utils.get_moe_layer_wise_logging_tracker().clear()
        training = training_module(modules.moe_utils)
        modules.ours.report_in_training_log(training, SimpleNamespace(**RUN))
        save_z_loss(modules.moe_utils, config())
        if stages == 1 or rank == 0:
            for layer in (1, 2):
                # 1 and 3 on the first rank, 2 and 4 on the other.
                loss = torch.tensor(2.0 * layer - 1 + rank)
                modules.ours.record_indexer_distill_loss(loss, layer, config(), 2)
        printed = [None, None]
        torch.distributed.all_gather_object(printed, training_log(training, config(), num_microbatches=1))
        assert printed[0] == printed[1]
        assert printed[0][NAME] == expected
        # Of all stages alike: the last one prints, whether or not it holds an indexer.
        averaged_over = modules.moe_utils.get_moe_layer_wise_logging_tracker()[NAME]["avg_group"]
        assert averaged_over is modules.parallel_state.get_data_parallel_group(with_context_parallel=True)
        modules.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_same_on_every_rank_and_no_hang(tmp_path):
    torch.multiprocessing.spawn(print_on_two_ranks, (str(tmp_path / "store"),), nprocs=2)


# --- Gradient scale -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["megatron", "primus"])
def test_gradient_follows_the_auto_scaler(modules, auto_scaler, road):
    attach = {
        "megatron": modules.ours.attach_indexer_distill_loss,
        "primus": modules.primus.V4IndexerLossAutoScaler.apply,
    }[road]
    output, parameter = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)

    def gradient(scale):
        attached = [attach(output, parameter.sum()) for _ in range(2)]
        torch.testing.assert_close(attached[0], output, rtol=0, atol=0)
        # Pipeline schedules set the scale after the forward passes of several micro-batches.
        if scale is not None:
            auto_scaler.set_loss_scale(torch.tensor([scale]))
        gradients = torch.autograd.grad(sum(a.sum() for a in attached), (output, parameter))
        torch.testing.assert_close(gradients[0], torch.full((3,), 2.0))
        return gradients[1].tolist()

    assert gradient(0.25) == [0.5, 0.5]
    assert gradient(8.0) == [16.0, 16.0]
    auto_scaler.main_loss_backward_scale = None
    assert gradient(None) == [2.0, 2.0], "1 until a schedule has set it"


def test_explicit_scale_goes_before_megatrons(modules, auto_scaler):
    auto_scaler.set_loss_scale(torch.tensor([8.0]))
    scaler = modules.primus.V4IndexerLossAutoScaler
    like = torch.zeros(())
    assert scaler.current_loss_scale(like).item() == 8.0
    try:
        scaler.set_loss_scale(torch.tensor(0.5))
        assert scaler.current_loss_scale(like).item() == 0.5
    finally:
        scaler.set_loss_scale(None)


def test_per_token_loss_counts_tokens(modules, auto_scaler):
    auto_scaler.set_loss_scale(torch.tensor([0.5]))
    parameter = torch.ones(2, requires_grad=True)
    output = torch.ones(3, requires_grad=True)
    attached = modules.ours.attach_indexer_distill_loss(output, parameter.sum(), num_tokens=6)
    attached.sum().backward()
    assert parameter.grad.tolist() == [3.0, 3.0]
