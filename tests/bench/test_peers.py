"""Peers are downloaded completely or not at all, and a failing peer affects only its own figures."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from eplb_lab.bench.contest import Contest, first_scene
from eplb_lab.bench.decision import Decision, Scene
from eplb_lab.bench.peers import archives
from eplb_lab.bench.peers.archives import VLLM_ASCEND_NEXT, Package, PeerError, fetch
from eplb_lab.bench.peers.balancers import PEERS

PACKAGE = Package("maker", "1.0", "maker-1.0", "maker/policy/", "0" * 64)
FILES = {"maker/policy/greedy.py": b"answer = 42\n", "maker/engine.py": b"import heavy\n"}


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests in tests."""


class Stays:
    """A policy that never changes the placement and counts its decisions."""

    def __init__(self) -> None:
        self.decision_count = 0

    def decide(self, scene: Scene) -> Decision:
        self.decision_count += 1
        return Decision(scene.placement_LRS, None, None, self.decision_count, 0.0, 0.0)


class Crashes:
    def decide(self, scene: Scene) -> Decision:
        raise ValueError("no room for the redundant experts")


class Sleeps:
    def decide(self, scene: Scene) -> Decision:
        time.sleep(60)
        raise AssertionError


class Spins:
    def decide(self, scene: Scene) -> Decision:
        while True:
            pass


class Dies:
    def decide(self, scene: Scene) -> Decision:
        os._exit(3)


@pytest.fixture
def scene() -> Scene:
    return first_scene(np.ones((3, 1, 4), dtype=np.int32), ranks=2, slots=3)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """Serve a directory as a package index; yield the directory and the index's URL."""
    monkeypatch.setattr(archives, "SOURCES", tmp_path / "peers")
    served = tmp_path / "index" / "maker"
    served.mkdir(parents=True)
    handler = partial(Silent, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield served, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def publish(served: Path, name: str, data: bytes) -> Package:
    """Add the archive to the index and return its package."""
    (served / name).write_bytes(data)
    (served / "index.html").write_text(f'<a href="../maker/{name}#sha256=ab">{name}</a>')
    return replace(PACKAGE, sha256=hashlib.sha256(data).hexdigest())


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def source_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"maker-1.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "data"), [("maker-1.0-py3-none-any.whl", wheel()), ("maker-1.0.tar.gz", source_archive())]
)
def test_only_the_balancers_are_unpacked(index: tuple[Path, str], name: str, data: bytes) -> None:
    served, address = index
    fetch(publish(served, name, data), address)
    unpacked = [path.relative_to(PACKAGE.root) for path in PACKAGE.root.rglob("*.py")]
    assert unpacked == [Path("maker/policy/greedy.py")]


def test_an_archive_with_the_wrong_digest_is_rejected(index: tuple[Path, str], tmp_path: Path) -> None:
    served, address = index
    publish(served, "maker-1.0.tar.gz", source_archive())
    with pytest.raises(PeerError, match="does not have the expected SHA-256 digest"):
        fetch(PACKAGE, address)
    with pytest.raises(PeerError, match=r"is not in .*, and fetching is disabled"):
        fetch(PACKAGE, "")
    with pytest.raises(PeerError, match="is not an http or https address"):
        fetch(PACKAGE, f"file://{tmp_path}")
    assert not PACKAGE.root.exists()
    assert all(len(package.sha256) == 64 for package, _ in PEERS.values())


def test_a_version_missing_from_the_index_is_reported(index: tuple[Path, str]) -> None:
    served, address = index
    publish(served, "maker-2.0.tar.gz", source_archive())
    with pytest.raises(PeerError, match=r"does not list maker-1\.0"):
        fetch(PACKAGE, address)


class Trickles(SimpleHTTPRequestHandler):
    """An index that sends its page byte by byte and counts the requests."""

    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests in tests."""


def test_an_index_that_never_ends_its_response_is_requested_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SOURCES", tmp_path / "peers")
    monkeypatch.setattr(archives, "_PAGE_SECONDS", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Trickles) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reported: list[str] = []
        contest = Contest(
            list(PEERS),
            f"http://127.0.0.1:{server.server_address[1]}",
            60,
            reported.append,
        )
        server.shutdown()
    assert Trickles.requests == 1
    assert contest.peers == []
    assert [failure["policy"] for failure in contest.failures] == list(PEERS)
    assert all("took more than 0.3 s" in failure["why"] for failure in contest.failures)


@pytest.fixture
def contest() -> Iterator[Contest]:
    empty_contest = Contest([], "", limit_seconds=60, report=lambda line: None)
    yield empty_contest
    empty_contest.close()


def test_a_policy_keeps_its_state_until_it_is_created_again(contest: Contest, scene: Scene) -> None:
    decisions = [contest._ask("stays", maker, scene) for maker in (Stays, None, Stays)]
    assert [decision and decision.changed_layers for decision in decisions] == [1, 2, 1]


def test_a_failing_policy_is_reported_and_the_next_one_runs(contest: Contest, scene: Scene) -> None:
    assert contest._ask("one", Crashes, scene) is None
    assert contest.failures[0]["why"].endswith("1x2x3x4: ValueError: no room for the redundant experts")
    assert contest._ask("one", Stays, scene) is not None


def test_a_policy_that_never_responds_is_stopped(
    contest: Contest, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest._ask("one", Stays, scene)
    with monkeypatch.context() as patched:
        patched.setattr("eplb_lab.bench.contest._IDLE_SECONDS", 1.0)
        assert contest._ask("one", Sleeps, scene) is None
        assert contest.failures[0]["why"].endswith("is blocked: it has used almost no CPU for 1 s")
    contest._ask("one", Stays, scene)
    contest._limit_seconds = 0.2
    assert contest._ask("one", Spins, scene) is None
    assert contest.failures[1]["why"].endswith("took more than 0.2 s of CPU time")
    contest._limit_seconds = 60.0
    assert contest._ask("one", Dies, scene) is None
    assert contest.failures[2]["why"].endswith("its process exited with code 3")
    assert contest._ask("one", Stays, scene) is not None


def test_policies_that_fail_the_warm_up_are_reported(contest: Contest, scene: Scene) -> None:
    contest._processes["slow"] = contest._processes["broken"] = Fails()  # type: ignore[assignment]
    assert contest.warm_up(["slow", "ours", "broken"], scene) == ["ours"]
    assert [failure["policy"] for failure in contest.failures] == ["slow", "broken"]


class Fails:
    """Stub for a policy's process that fails and returns the reason."""

    def ask(self, *question: object) -> str:
        return "no room"

    def end(self) -> None:
        """Do nothing, because no process runs."""


class FixedPolicy(Stays):
    """A policy that returns the placement passed to its constructor."""

    def __init__(self, placement_LRS: object) -> None:
        self._placement_LRS = placement_LRS

    def decide(self, scene: Scene) -> Decision:
        return Decision(self._placement_LRS, None, None, 1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([[[0, 0, 1], [2, 3, 3]]], None),
        ([[[0, 0, 1], [2, 2, 3], [0, 1, 2]]], "returned a placement of shape [1, 3, 3], expected [1, 2, 3]"),
        ([[[0, 1, 2], [0, 1, 2]]], "returned an invalid placement (layer 0: expert 3 has no slot)"),
        ([[[0, 1, 2], [3, 1, 4]]], "has expert 4"),
        ([[[0, 1, 2], [3, 1, -1]]], "leaves slots empty"),
        ([[[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]]], "expected a placement of integers"),
    ],
)
def test_invalid_responses_are_reported_and_valid_ones_are_scored(
    contest: Contest, scene: Scene, answer: list[object], why: str | None
) -> None:
    decision = contest._ask("one", partial(FixedPolicy, np.array(answer)), scene)
    assert (decision is None) == (why is not None)
    if why is not None:
        assert why in contest.failures[0]["why"]


STAIR = """
from types import SimpleNamespace
from vllm.distributed import get_eplb_group
from vllm_ascend.ascend_config import StairConfig
from vllm_ascend.distributed.eplb.policy import PreparedLoadStats


class StairEplbPolicy:
    @classmethod
    def plan_rebalance(cls, loads, placed, committed_L, node_R, config):
        assert loads.shape == (3, 1, 4) and placed.shape == (1, 2, 3) and node_R.tolist() == [0, 0]
        # STAIR changes a layer once. NaN as the committed ratio marks the first call.
        changes = committed_L[0] != committed_L[0]
        predicted = [1.25 if changes else float("nan")]
        return SimpleNamespace(rank_expert_ids=placed[:, ::-1] if changes else placed, predicted_mean_ratios=predicted)
"""


def test_stair_receives_the_ratio_after_the_last_change_of_the_layer(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="PEERS ARE NOT TESTED: torch is not installed")
    monkeypatch.setattr(archives, "SOURCES", tmp_path)
    folder = VLLM_ASCEND_NEXT.root / VLLM_ASCEND_NEXT.folder
    folder.mkdir(parents=True)
    (folder / "stair.py").write_text(STAIR)
    before = set(sys.modules)
    try:
        policy = PEERS["STAIR"][1]()
        assert [policy.decide(scene).changed_layers for _ in range(3)] == [1, 0, 0]
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("vllm", "vllm_ascend"):
                del sys.modules[name]
