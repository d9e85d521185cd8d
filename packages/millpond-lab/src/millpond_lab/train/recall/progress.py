"""Progress display of the training of `pond-recall`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from millpond_lab.train.recall.curriculum import LENGTHS
from millpond_lab.train.recall.run import RecallLogLine, RecallRun, Recipe


@contextmanager
def training_progress(visible: bool, recipe: Recipe) -> Iterator[Callable[[RecallRun, RecallLogLine], None]]:
    """A progress bar over the stages and the polish; yields the function that moves it."""
    text = TextColumn("step {task.fields[step]}  {task.description}  loss {task.fields[loss]:.3f}")
    with Progress(text, BarColumn(), TimeElapsedColumn(), disable=not visible) as bar:
        task = bar.add_task("starting", total=len(LENGTHS) + 1, step=0, loss=0.0)

        def show(run: RecallRun, line: RecallLogLine) -> None:
            place = run.curriculum
            what = "polish" if place.polishing else f"{LENGTHS[place.stage]} words"
            done = place.stage + place.polished / max(1, recipe.polish_steps)
            about = f"{what}  right {place.mean:.3f}"
            bar.update(task, completed=done, description=about, step=run.step, loss=line.loss)

        yield show
