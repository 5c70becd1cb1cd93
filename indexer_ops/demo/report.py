"""The numbers of the two runs: as JSON, and as a table for the terminal."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from .evaluation import Evaluation
from .training import Run


def layer_numbers(with_loss: Evaluation, without_loss: Evaluation) -> list[dict[str, float]]:
    """One entry per CSA layer; ``captured_best`` is what the oracle's selection would capture."""
    numbers = []
    for layer, taught in with_loss.layers.items():
        untaught = without_loss.layers[layer]
        numbers.append(
            {
                "layer": layer,
                "chance": taught.chance,
                "recall_with_loss": taught.recall,
                "recall_without_loss": untaught.recall,
                "kl_with_loss": taught.kl,
                "kl_without_loss": untaught.kl,
                "captured_with_loss": taught.captured,
                "captured_best": taught.captured_best,
                "captured_without_loss": untaught.captured,
                "captured_best_without_loss": untaught.captured_best,
            }
        )
    return numbers


def as_json(settings: dict[str, Any], with_loss: Run, without_loss: Run) -> dict[str, Any]:
    """Everything: ``settings``, the last evaluation under ``layers`` and ``lm_loss``, and both runs' ``curves``."""
    return {
        "settings": settings,
        "lm_loss": {"with_loss": with_loss.last.lm_loss, "without_loss": without_loss.last.lm_loss},
        "layers": layer_numbers(with_loss.last, without_loss.last),
        "curves": {"with_loss": _curves(with_loss), "without_loss": _curves(without_loss)},
    }


def _curves(run: Run) -> dict[str, Any]:
    held_out = [
        {
            "step": step,
            "lm_loss": evaluation.lm_loss,
            "layers": [{"layer": layer, **asdict(quality)} for layer, quality in evaluation.layers.items()],
        }
        for step, evaluation in sorted(run.evaluations.items())
    ]
    training = {"lm_loss": run.lm_loss, "kl": [{"layer": layer, "kl": kl} for layer, kl in run.kl.items()]}
    return {"held_out": held_out, "training": training}


def table(numbers: list[dict[str, float]], topk: int) -> Table:
    """The last evaluation, one line per layer."""
    columns = {
        "CSA\nlayer": "layer",
        "recall by\nchance": "chance",
        "recall\nwith loss": "recall_with_loss",
        "recall\nwithout": "recall_without_loss",
        "KL\nwith loss": "kl_with_loss",
        "captured\nwith loss": "captured_with_loss",
        "captured\nat best": "captured_best",
    }
    title = f"Held-out text: the {topk} pool entries that a query selects, and the attention they capture"
    shown = Table(title=title, title_justify="left")
    for heading in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in numbers:
        shown.add_row(*(str(line[key]) if key == "layer" else f"{line[key]:.3f}" for key in columns.values()))
    return shown


def verdict(numbers: list[dict[str, float]], lm_loss: dict[str, float]) -> str:
    """What the table says, in two sentences."""

    def times_chance(name: str) -> str:
        factors = [line[name] / line["chance"] for line in numbers]
        return f"{min(factors):.2f} to {max(factors):.2f}"

    return (
        f"Of the entries that attention wants most, the indexers find {times_chance('recall_with_loss')} times as many "
        f"as chance with the loss, and {times_chance('recall_without_loss')} times as many without it. LM loss: "
        f"{lm_loss['with_loss']:.3f} with the loss, {lm_loss['without_loss']:.3f} without."
    )
