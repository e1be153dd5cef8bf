"""The trace file that observe mode writes without a service."""

import numpy as np
import pytest

from eplb_service.io.open_trace import open_trace
from worker_agent.observe.trace import TraceFile


def heat(steps, first=0):
    return (first + np.arange(steps * 6, dtype=np.int32)).reshape(steps, 2, 3)


def test_the_newest_steps_can_be_read_as_a_trace(tmp_path):
    path = tmp_path / "heat.npz"
    trace = TraceFile(path, max_bytes=5 * 24)
    trace.append(0, heat(4))
    trace.write()
    trace.append(4, heat(4, first=24))
    trace.write()
    opened = open_trace(path)
    assert (opened.steps, opened.layers, opened.experts) == (5, 2, 3)
    assert np.array_equal(opened.heat(0, 5), heat(8)[3:])
    assert [file.name for file in tmp_path.iterdir()] == ["heat.npz"]


def test_a_trace_without_new_steps_is_not_rewritten(tmp_path):
    path = tmp_path / "heat.npz"
    trace = TraceFile(path)
    trace.write()
    assert not path.exists()
    trace.append(0, heat(1))
    trace.write()
    path.unlink()
    trace.write()
    assert not path.exists()


@pytest.mark.parametrize("empty", [[1], [0, 3], [0, 1, 2, 3]])
def test_steps_without_tokens_are_skipped(tmp_path, empty):
    path = tmp_path / "heat.npz"
    trace = TraceFile(path)
    steps = heat(4, first=1)
    steps[empty] = 0
    trace.append(5, steps)
    trace.write()
    expected = [step for step in range(5, 9) if step - 5 not in empty]
    assert path.exists() == bool(expected)
    if expected:
        with np.load(path) as written:
            assert written["step"].tolist() == expected
            assert (written["heat"].sum(axis=(1, 2)) > 0).all()


def test_one_step_is_kept_even_if_it_exceeds_the_limit(tmp_path):
    trace = TraceFile(tmp_path / "heat.npz", max_bytes=1)
    trace.append(0, heat(3))
    trace.write()
    assert open_trace(tmp_path / "heat.npz").steps == 1


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "heat.npz"
    trace = TraceFile(path)
    trace.append(0, heat(1))
    trace.write()
    trace.append(1, heat(1))

    def fail(file, **_):
        file.write(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fail)
        with pytest.raises(OSError, match="no space left"):
            trace.write()
    assert open_trace(path).steps == 1
    assert [file.name for file in tmp_path.iterdir()] == ["heat.npz"]
    trace.write()
    assert open_trace(path).steps == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("heat.zarr", "must end in .npz"), ("none/heat.npz", "does not exist; create it first")],
)
def test_a_path_that_cannot_be_written_is_rejected(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TraceFile(tmp_path / name)
