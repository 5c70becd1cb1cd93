"""The progress bars of the two runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .training import Run


@contextmanager
def training_progress(console: Console, steps: int) -> Iterator[Callable[[str], Callable[[Run], None]]]:
    """Yields ``follow(title)``, which starts a bar and returns what to call with the run after each of its steps."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    with Progress(*columns, console=console) as progress:

        def follow(title: str) -> Callable[[Run], None]:
            task = progress.add_task(title, total=steps, losses="")

            def on_step(run: Run) -> None:
                losses = f"LM {run.lm_loss[-1]:.2f}"
                if run.kl:
                    losses += f"  KL {sum(kl[-1] for kl in run.kl.values()) / len(run.kl):.3f}"
                progress.update(task, advance=1, losses=losses)

            return on_step

        yield follow
