"""A Dockerfile is read as its own language says; what is not understood is refused, and ours is understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.image_steps.__main__ import main
from tools.image_steps.dockerfile import DockerfileError, stages_of

ROOT = Path(__file__).parents[2]
TEXT = """\
# syntax=docker/dockerfile:1
ARG IMAGE=python:slim

FROM ${IMAGE} AS build
RUN make \\
    all
# A comment.
FROM ${IMAGE}
RUN --mount=type=bind,from=build,source=/out,target=/out cp /out/it /usr/bin/it
ENV A=1 \\
    B="two words"
CMD ["one"]
CMD ["serve", "--port=1"]
"""


def test_stages_and_their_instructions() -> None:
    build, last = stages_of(TEXT)
    assert (build.base, build.name, last.base, last.name) == ("python:slim", "build", "python:slim", "")
    assert [(step.word, step.rest) for step in build.steps] == [("RUN", "make all")]
    copy = last.steps[0]
    assert copy.flags == {"mount": "type=bind,from=build,source=/out,target=/out"}
    assert copy.rest == "cp /out/it /usr/bin/it"
    assert last.steps[1].words == ["A=1", "B=two words"]
    command = last.last("CMD")
    assert command is not None
    assert command.words == ["serve", "--port=1"]
    assert last.last("ENTRYPOINT") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ONBUILD RUN x", "not understood: ONBUILD RUN x"),
        ("RUN x", "RUN before the first FROM"),
        ("FROM a b", "not understood: FROM a b"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, says: str) -> None:
    with pytest.raises(DockerfileError, match=says):
        stages_of(text)


def test_our_own_has_all_that_a_container_is_started_by() -> None:
    build, last = stages_of((ROOT / "Dockerfile").read_text())
    assert build.name == "build"
    assert all(
        last.last(word) is not None for word in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "STOPSIGNAL", "USER")
    )


def test_without_root_it_says_that_nothing_was_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["image_steps"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("image steps SKIPPED: it needs root")
