"""The distillation loss in ``transformers.Trainer``: scaled right under gradient accumulation, and in its log."""

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...training.coefficient import CoefficientSchedule
from ...training.tracker import DistillLossTracker
from .handle import IndexerDistillation


class IndexerDistillationCallback(TrainerCallback):
    """Weights the loss of a ``Trainer`` as its other losses, and logs what the layers measured::

        handle = enable_indexer_distillation(model)
        trainer = Trainer(model, ...)
        trainer.add_callback(IndexerDistillationCallback(trainer, handle))

    Scaling: where ``Trainer`` passes ``num_items_in_batch``, it neither divides the loss of a micro-batch by the number
    of micro-batches nor, with ``average_tokens_across_devices``, leaves the average over ranks to the gradients: the
    model's loss is a sum divided by all tokens already. The distillation loss is a mean, and would count once for each
    micro-batch and rank. So ``handle.coeff`` is set at every step to the schedule's coefficient divided by what
    ``Trainer`` leaves out; it is the coefficient again when training ends. Micro-batches weigh the same, whatever part
    of them is padding.

    Log: with every entry of ``Trainer`` another one, ``indexer_kl`` (mean over layers with an indexer) and
    ``indexer_kl/layers.N`` (N as in ``model.layers``), averaged over micro-batches, steps and ranks since the last.
    Evaluation and steps skipped by a gradient scaler do not count. Nothing with coefficient 0.

    Args:
        trainer: gets the callback by ``add_callback``. Batches must have ``labels``; a ``compute_loss_func`` has to add
            ``handle.loss`` itself.
        handle: of ``enable_indexer_distillation``, of the trainer's model.
        schedule: the coefficient by optimizer step; None keeps ``handle.coeff`` as it is now.

    Raises:
        ValueError: ``trainer`` smooths labels: it then computes its loss from logits alone and drops the model's.

    Source: ``Trainer.training_step`` and ``Trainer.compute_loss`` of transformers 5.24.
    """

    def __init__(
        self, trainer: Trainer, handle: IndexerDistillation, schedule: CoefficientSchedule | None = None
    ) -> None:
        if trainer.label_smoother is not None:
            raise ValueError("trainer must not smooth labels (label_smoothing_factor): it drops the model's loss then")
        self._trainer = trainer
        self._handle = handle
        self._schedule = schedule if schedule is not None else CoefficientSchedule(handle.coeff)
        self._tracker: DistillLossTracker | None = None
        self._reported_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Begin to count; every rank takes part."""
        layers = [f"layers.{layer}" for layer in self._handle.layers]
        self._tracker = DistillLossTracker(layers, device=args.device)
        self._reported_step = state.global_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Set the coefficient of the micro-batches to come."""
        self._handle.coeff = self._schedule.at(state.global_step) / self._left_out(args)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Record a micro-batch that is not the last of its step."""
        for layer, kl in self._handle.per_layer.items():
            self._tracker.record(f"layers.{layer}", kl)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Record the last micro-batch, and log where the trainer does."""
        self.on_substep_end(args, state, control)
        self._tracker.step(skipped=self._trainer.accelerator.optimizer_step_was_skipped)
        self._log(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Log where the trainer does only now (``logging_strategy="epoch"``)."""
        self._log(state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Leave the handle with the coefficient that the schedule ends with."""
        self._handle.coeff = self._schedule.at(state.global_step)

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        if not control.should_log or state.global_step == self._reported_step:
            return
        self._reported_step = state.global_step
        scalars = self._tracker.report(state.global_step).scalars()
        if scalars:
            self._trainer.log(scalars)
            control.should_log = True  # logging has cleared it, and the trainer's own entry is still to come

    def _left_out(self, args: TrainingArguments) -> int:
        """How often the trainer counts a mean of one micro-batch on one rank, where it should count once."""
        trainer = self._trainer
        takes_token_count = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # newer than transformers 5.17
        if is_scaled is None:
            is_scaled = takes_token_count
        micro_batches = trainer.current_gradient_accumulation_steps if is_scaled else 1
        if takes_token_count and args.average_tokens_across_devices:
            return micro_batches * (trainer.accelerator.num_processes // trainer.get_tp_size())
        return micro_batches
