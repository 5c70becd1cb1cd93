"""``transformers.Trainer``: accumulated micro-batches give the step of one large batch; the log shows the layers."""

import functools
import os

import pytest
import torch

pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments  # noqa: E402

from indexer_ops.integrations.transformers import enable_indexer_distillation  # noqa: E402
from indexer_ops.integrations.transformers.trainer_callback import IndexerDistillationCallback  # noqa: E402
from indexer_ops.training import CoefficientSchedule  # noqa: E402
from processes import run_on_ranks  # noqa: E402
from small_deepseek_v4 import CSA_LAYERS, indexer_parameters, small_model, tokens  # noqa: E402

SAMPLES = [{"input_ids": row, "labels": row} for row in tokens(batch=4)]
LAYER_KEYS = [f"indexer_kl/layers.{layer}" for layer in CSA_LAYERS]


class TrainerInOrder(Trainer):
    """Keeps the order of the samples, and the gradients of each step as they are before clipping."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.accumulated = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return loss


def make_trainer(directory, batch, accumulation, schedule=None, trainer_class=TrainerInOrder, **options):
    model = small_model()
    handle = enable_indexer_distillation(model, 0.5)
    arguments = {
        "output_dir": str(directory),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "sgd",
        "learning_rate": 0.0,
    }
    arguments = TrainingArguments(**arguments | options)
    trainer = trainer_class(model, arguments, train_dataset=SAMPLES, eval_dataset=SAMPLES[:2])
    trainer.add_callback(IndexerDistillationCallback(trainer, handle, schedule))
    return trainer, handle


@pytest.fixture
def trainer_of(tmp_path):
    return functools.partial(make_trainer, tmp_path)


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "indexer_kl" in entry]


@pytest.mark.parametrize("loss_kwargs", [True, False], ids=["token_count", "divided_by_trainer"])
@pytest.mark.parametrize(("batch", "accumulation"), [(2, 2), (1, 4), (1, 8)])
def test_accumulation_is_one_large_batch(trainer_of, batch, accumulation, loss_kwargs):
    """With 8, the step of the epoch's end has fewer micro-batches than asked for."""

    results = []
    for sizes in ((4, 1), (batch, accumulation)):
        trainer, handle = trainer_of(*sizes)
        trainer.model_accepts_loss_kwargs = loss_kwargs
        trainer.train()
        assert handle.coeff == 0.5
        results.append((trainer.accumulated, logged(trainer)))
    (expected, (expected_log,)), (actual, (log,)) = results
    assert expected.keys() == actual.keys() >= indexer_parameters(trainer.model).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda text: f"{name}: {text}")
    for key in ("indexer_kl", *LAYER_KEYS):
        assert log[key] == pytest.approx(expected_log[key], rel=1e-4)
    assert log["indexer_kl"] == pytest.approx(sum(log[key] for key in LAYER_KEYS) / len(LAYER_KEYS))


def test_log_is_the_mean_of_the_steps_since_the_last_and_evaluation_does_not_count(trainer_of):
    trainer, _ = trainer_of(1, 1)
    trainer.train()
    one_by_one = logged(trainer)
    assert [entry["step"] for entry in one_by_one] == [1, 2, 3, 4]
    together, _ = trainer_of(1, 1, logging_steps=2, eval_strategy="steps", eval_steps=1)
    together.train()
    assert [entry["step"] for entry in logged(together)] == [2, 4]
    for entry, pair in zip(logged(together), (one_by_one[:2], one_by_one[2:]), strict=True):
        for key in LAYER_KEYS:
            assert entry[key] == pytest.approx(sum(single[key] for single in pair) / 2, rel=1e-5)


def test_logging_by_epoch(trainer_of):
    trainer, _ = trainer_of(2, 1, logging_strategy="epoch")
    trainer.train()
    assert [entry["step"] for entry in logged(trainer)] == [2]


def test_the_trainer_s_own_entries_stay(trainer_of):
    trainer, _ = trainer_of(1, 1)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]


def test_schedule_sets_the_coefficient(trainer_of):
    seen = []

    class Watching(TrainerInOrder):
        def training_step(self, *args, **kwargs):
            seen.append(self.model.model.indexer_distillation.coeff)
            return super().training_step(*args, **kwargs)

    trainer, handle = trainer_of(1, 2, schedule=CoefficientSchedule(0.9, warm_up_steps=2), trainer_class=Watching)
    trainer.train()
    assert seen == pytest.approx([0.15, 0.15, 0.3, 0.3])
    assert handle.coeff == pytest.approx(0.9)


def test_coefficient_0_logs_nothing_and_gives_zeros(trainer_of):
    trainer, _ = trainer_of(2, 1, schedule=CoefficientSchedule.off())
    trainer.train()
    assert logged(trainer) == []
    assert all(not trainer.accumulated[name].any() for name in indexer_parameters(trainer.model))


def test_smoothed_labels_are_refused(trainer_of):
    with pytest.raises(ValueError, match="^trainer must not smooth labels"):
        trainer_of(2, 1, label_smoothing_factor=0.1)


def train_on_a_rank(rank, world_size, directory):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    store = torch.distributed.FileStore(f"{directory}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trainer, _ = make_trainer(directory, 1, 2)
    trainer.train()
    torch.save((trainer.accumulated, logged(trainer)), f"{directory}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_are_one_large_batch(trainer_of, tmp_path):
    run_on_ranks(train_on_a_rank, 2, str(tmp_path))
    trainer, _ = trainer_of(4, 1)
    trainer.train()
    (expected_log,) = logged(trainer)
    for rank in range(2):
        gradients, (log,) = torch.load(tmp_path / f"{rank}.pt")
        assert gradients.keys() == trainer.accumulated.keys()
        for name, expected in trainer.accumulated.items():
            torch.testing.assert_close(
                gradients[name], expected, rtol=1e-3, atol=1e-5, msg=lambda text: f"{name}: {text}"
            )
        for key in ("indexer_kl", *LAYER_KEYS):
            assert log[key] == pytest.approx(expected_log[key], rel=1e-4)
