"""A progress bar of a replay on stderr: all jobs together, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eplb_service.replay.jobs import Job, JobProgress
from eplb_service.replay.policy_replay import ReplayedDecision


@contextmanager
def replay_progress(
    jobs: Sequence[Job], steps: int, done: int = 0
) -> Iterator[Callable[[str, JobProgress], None]]:
    """Within it, what is called with a job's label and progress moves the bar on; without a terminal there is none.

    ``done`` decisions have been made before.
    """
    columns = (
        TextColumn("decisions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}"),
    )
    total = sum(len(job.setup.schedule.decisions(steps)) for job in jobs)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _label, _progress: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("decisions", total=total, completed=done, last="")

        def advance(label: str, done_now: JobProgress) -> None:
            made = done_now.made
            last = f"{label}: PAR {made.par_realised:.3f}" if isinstance(made, ReplayedDecision) else label
            progress.update(task, advance=1, last=last)

        yield advance
