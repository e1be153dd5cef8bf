"""Carries out the instructions of a Dockerfile's stages, each in a root of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tools.image_steps.dockerfile import DockerfileError, Instruction, Stage
from tools.image_steps.root import Root

_OF_NO_EFFECT = frozenset({"VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"})
"""At build time."""
Report = Callable[[str, float], None]


class Build:
    """All stages of an image.

    Parameters
    ----------
    context
        What ``COPY`` copies from: the files that the build context holds, and no others.
    folder
        Where roots are made.
    report
        Called after each step with what it was and the seconds that it took.
    """

    def __init__(self, context: Path, folder: Path, report: Report) -> None:
        self._context = context
        self._folder = folder
        self._report = report
        self._roots: dict[str, Root] = {}

    def stage(self, stage: Stage) -> Root:
        """Carry out one stage; raises ``StepError`` or ``DockerfileError``."""
        root = Root(self._folder / f"stage-{len(self._roots)}")
        root.folder.mkdir()
        self._roots[stage.name or str(len(self._roots))] = root
        self._timed(f"FROM {stage.base}, in its place this machine's system", root.make)
        for step in stage.steps:
            text = " ".join(f"{step.word} {step.rest}".split())
            self._timed(text, lambda step=step: self._carry_out(root, step))  # type: ignore[misc]
        return root

    def _timed(self, text: str, action: Callable[[], None]) -> None:
        began = time.monotonic()
        action()
        self._report(text, time.monotonic() - began)

    def _carry_out(self, root: Root, step: Instruction) -> None:
        if step.word == "WORKDIR":
            root.folder_inside = step.rest
            (root.folder / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.word == "USER":
            root.user = step.rest
        elif step.word == "ENV":
            root.environment |= dict(word.split("=", 1) for word in shlex.split(step.rest))
        elif step.word == "COPY":
            self._copy(root, step)
        elif step.word == "RUN":
            self._run(root, step)
        elif step.word not in _OF_NO_EFFECT:
            raise DockerfileError(f"not understood in a stage: {step.word} {step.rest}")

    def _copy(self, root: Root, step: Instruction) -> None:
        source, target = step.words
        where = Path(root.folder_inside, target)
        inside = root.folder / str(where).lstrip("/")
        if (self._context / source).is_dir():
            shutil.copytree(self._context / source, inside, dirs_exist_ok=True)
        else:
            shutil.copy(self._context / source, inside)

    def _run(self, root: Root, step: Instruction) -> None:
        mounted = dict(part.split("=", 1) for part in step.flags.get("mount", "").split(",") if part)
        if mounted:
            source = self._roots[mounted["from"]].folder / mounted["source"].lstrip("/")
            root.bind(source, mounted["target"])
        try:
            # What pip asks, and by whose certificates, is the machine's, as with a runtime's own settings.
            settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
            settings |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
            root.run(["sh", "-c", step.rest], settings)
        finally:
            if mounted:
                root.unbind(mounted["target"])
