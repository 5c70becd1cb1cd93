"""``indexer-ops demo --trainer``: one run with the loss inside ``transformers.Trainer``, and what its log shows."""

import argparse
import json
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments

from ..integrations.transformers import enable_indexer_distillation
from ..integrations.transformers.trainer_callback import IndexerDistillationCallback
from .evaluation import Evaluation, evaluate
from .model import SEQUENCE_LENGTH, small_model
from .text import Corpus
from .training import BATCH, GRADIENT_NORM, LEARNING_RATE, WARMUP_STEPS

LOG_ENTRIES = 20


def train_with_trainer(
    arguments: argparse.Namespace, device: torch.device, corpus: Corpus, held_out_sequences: int
) -> None:
    """Train with the loss, log every layer's KL and their mean, write ``demo_trainer.json`` and print a table."""
    console = Console()
    model = small_model(arguments.seed)
    handle = enable_indexer_distillation(model, coeff=arguments.coeff)
    batches = corpus.training_batches(arguments.steps, BATCH, SEQUENCE_LENGTH, arguments.seed)
    rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.out),
            max_steps=arguments.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=GRADIENT_NORM,
            logging_steps=max(1, arguments.steps // LOG_ENTRIES),
            save_strategy="no",
            report_to=[],
            seed=arguments.seed,
            use_cpu=device.type == "cpu",
        ),
        train_dataset=rows,
    )
    trainer.add_callback(IndexerDistillationCallback(trainer, handle))
    trainer.train()
    handle.disable()
    held_out = corpus.held_out_sequences(held_out_sequences, SEQUENCE_LENGTH).to(trainer.args.device)
    result = evaluate(model, held_out)
    path = arguments.out / "demo_trainer.json"
    layers = [{"layer": layer, **asdict(quality)} for layer, quality in result.layers.items()]
    path.write_text(json.dumps({"log": trainer.state.log_history, "layers": layers}, indent=1) + "\n", encoding="utf-8")
    console.print(_table(trainer.state.log_history, result))
    console.print(f"Wrote {path}.", highlight=False)


def _table(log: list[dict], result: Evaluation) -> Table:
    """The trainer's entries of each layer's KL, and the recall on held-out text below them."""
    keys = [f"indexer_kl/layers.{layer}" for layer in result.layers]
    shown = Table(title="The KL of each CSA layer in the trainer's log", title_justify="left")
    for heading in ("step", "mean", *(f"layer {layer}" for layer in result.layers)):
        shown.add_column(heading, justify="right")
    for entry in log:
        if "indexer_kl" in entry:
            shown.add_row(str(entry["step"]), f"{entry['indexer_kl']:.4f}", *(f"{entry[key]:.4f}" for key in keys))
    shown.add_section()
    shown.add_row("recall", "", *(f"{quality.recall:.3f}" for quality in result.layers.values()))
    shown.add_row("by chance", "", *(f"{quality.chance:.3f}" for quality in result.layers.values()))
    return shown
