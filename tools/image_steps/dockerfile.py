"""The stages of a Dockerfile and their instructions: as much of its language as ours uses, an error for the rest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_IN_BUILDS = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV")
_OF_CONTAINERS = ("ENTRYPOINT", "CMD", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK")
_KNOWN = frozenset({*_IN_BUILDS, *_OF_CONTAINERS})
_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")


class DockerfileError(ValueError):
    """The Dockerfile says something that is not understood here; the message quotes it."""


@dataclass(frozen=True)
class Instruction:
    """One of them.

    Parameters
    ----------
    word
        In capitals.
    flags
        Those before the rest, such as ``mount`` of ``RUN --mount=...``.
    rest
        What follows, on one line.
    """

    word: str
    flags: dict[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        """The rest as a list: a JSON array, or words as a shell has them."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass(frozen=True)
class Stage:
    """What follows one ``FROM``.

    Parameters
    ----------
    base, name
        The image that it begins with, and its own name, empty where it has none.
    steps
        Its instructions in order.
    """

    base: str
    name: str
    steps: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction | None:
        """The one that holds where there may be several."""
        return next((step for step in reversed(self.steps) if step.word == word), None)


def stages_of(text: str) -> list[Stage]:
    """The stages of a Dockerfile; raises ``DockerfileError``."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _instructions(text):
        if step.word == "ARG" and not stages:
            name, _, value = step.rest.partition("=")
            arguments[name] = value
        elif step.word == "FROM":
            words = [re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], word) for word in step.words]
            if len(words) not in (1, 3):
                raise DockerfileError(f"not understood: FROM {step.rest}")
            stages.append(Stage(words[0], words[2] if len(words) == 3 else ""))
        elif stages:
            stages[-1].steps.append(step)
        else:
            raise DockerfileError(f"{step.word} before the first FROM")
    return stages


def _instructions(text: str) -> Iterator[Instruction]:
    whole = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, whole.splitlines())):
        word, _, rest = line.partition(" ")
        if word not in _KNOWN:
            raise DockerfileError(f"not understood: {line}")
        flags = {}
        while (match := _FLAG.match(rest.lstrip())) is not None:
            flags[match[1]] = match[2]
            rest = rest.lstrip()[match.end() :]
        yield Instruction(word, flags, " ".join(rest.split()) if word != "ENV" else rest.strip())
