"""One training run, with the distillation loss or without it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from ..integrations.transformers import enable_indexer_distillation
from .evaluation import Evaluation, evaluate

BATCH = 2
LEARNING_RATE = 2e-3
# The indexer chases a teacher that moves, so it learns faster than what it learns from.
INDEXER_LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
# Of the steps, this last part lowers the learning rates to 0, so that what is measured has settled.
DECAY_FRACTION = 0.4
GRADIENT_NORM = 1.0
EVALUATIONS = 5


@dataclass
class Run:
    """What one run left behind, step by step."""

    lm_loss: list[float] = field(default_factory=list)
    # The KL of each CSA layer on the training batch; empty lists stay empty without the loss.
    kl: dict[int, list[float]] = field(default_factory=dict)
    # By the number of steps done: from 0, before any, to all of them.
    evaluations: dict[int, Evaluation] = field(default_factory=dict)

    @property
    def last(self) -> Evaluation:
        return self.evaluations[max(self.evaluations)]


def _learning_rate_factor(step: int, steps: int) -> float:
    warmup = (step + 1) / WARMUP_STEPS
    decay = (steps - step) / max(1.0, DECAY_FRACTION * steps)
    return min(1.0, warmup, decay)


def train(
    model: DeepseekV4ForCausalLM,
    batches: Iterable[Tensor],
    steps: int,
    held_out: Tensor,
    coeff: float | None,
    on_step: Callable[[Run], None],
) -> Run:
    """Train ``model`` on ``steps`` batches ``[B, S]``, with the distillation loss unless ``coeff`` is None."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[".indexer." in name].append(parameter)
    rest, indexer = parts
    optimizer = torch.optim.AdamW(
        [{"params": rest, "lr": LEARNING_RATE}, {"params": indexer, "lr": INDEXER_LEARNING_RATE}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, steps))
    handle = None if coeff is None else enable_indexer_distillation(model, coeff=coeff)
    evaluate_at = {round(i * steps / EVALUATIONS) for i in range(EVALUATIONS + 1)}
    run = Run()
    run.evaluations[0] = evaluate(model, held_out)
    model.train()
    for step, batch in enumerate(batches):
        batch = batch.to(held_out.device)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        # Clipped apart: with one norm for all, the indexer's gradients would scale those of the model.
        for parameters in parts:
            torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        distillation = 0.0 if handle is None else handle.loss.item()
        run.lm_loss.append(loss.item() - distillation)
        for layer, kl in (handle.per_layer if handle is not None else {}).items():
            run.kl.setdefault(layer, []).append(kl.item())
        if step + 1 in evaluate_at:
            run.evaluations[step + 1] = evaluate(model, held_out)
        on_step(run)
    if handle is not None:
        handle.disable()
    return run
