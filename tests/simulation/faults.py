"""Faults for a run. Each function draws its parameters from the world's seed, injects the fault, and describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.stream import NAME

_THREADS = ("model", "eplb-transfer", "eplb-peers", "eplb-stream", "eplb-reformation")


def _trouble(rate: str) -> Callable[[Any], str]:
    def begin(world: Any) -> str:
        seconds = world.random.choice((2.0, 30.0))
        part = world.random.choice((0.1, 0.5, 1.0))
        if rate == "flipped" and not world.settings["verify_transfers"]:
            return "none, because transfers are not verified"
        setattr(world.network, rate, part)
        world.later(seconds, lambda: setattr(world.network, rate, 0.0))
        return f"{part:.0%} for {seconds} s"

    return begin


def _misfit(kind: str) -> Callable[[Any], str]:
    def begin(world: Any) -> str:
        misfits = world.random.choice(world.engine.misfits)
        many = world.random.choice((1, 1, 3))
        setattr(misfits, kind, getattr(misfits, kind) + many)
        return f"{many} on rank {world.engine.misfits.index(misfits)}"

    return begin


class Faults:
    """One method per kind of fault, named after the kind."""

    lost_datagrams = _trouble("lost")
    late_datagrams = _trouble("late")
    doubled_datagrams = _trouble("doubled")
    rejected_datagrams = _trouble("rejected")
    replayed_datagrams = _trouble("replayed")
    flipped_bits = _trouble("flipped")
    missed_call = _misfit("missed")
    doubled_call = _misfit("doubled")
    counted_twice = _misfit("counted")

    def stop(world: Any) -> str:
        rank = world.rank()
        seconds = world.random.choice((0.2, 1.0, 5.0, 15.0))
        world.engine.ranks[rank].freeze(seconds)
        return f"rank {rank} for {seconds} s"

    def hang(world: Any) -> str:
        rank = world.rank()
        seconds = world.random.choice((1.0, 8.0))
        thread = world.random.choice(_THREADS)
        world.engine.ranks[rank].freeze(seconds, thread)
        return f"{thread} of rank {rank} for {seconds} s"

    def exception(world: Any) -> str:
        rank = world.rank()
        thread = world.random.choice(_THREADS)
        world.engine.ranks[rank].failing[thread] = world.random.randint(1, 20), MemoryError
        return f"a MemoryError in {thread} of rank {rank}"

    def interrupt_in_a_commit(world: Any) -> str:
        rank = world.rank()
        looks = world.random.randint(1, 6)
        failing = world.engine.ranks[rank].failing
        world.network.aimed.append(lambda: failing.update(model=(looks, KeyboardInterrupt)))
        return f"rank {rank}"

    def cut(world: Any) -> str:
        pair = world.random.sample(world.engine.ranks, 2)
        seconds = world.random.choice((0.5, 5.0, 20.0))
        world.network.cut(pair[0].name, pair[1].name, seconds)
        return f"between {pair[0].name} and {pair[1].name} for {seconds} s"

    def cut_in_a_commit(world: Any) -> str:
        pair = world.random.sample(world.engine.ranks, 2)
        seconds = world.random.choice((0.5, 5.0))

        world.network.aimed.append(lambda: world.network.cut(pair[0].name, pair[1].name, seconds))
        return f"between {pair[0].name} and {pair[1].name} for {seconds} s"

    def links_end(world: Any) -> str:
        pair = world.random.sample(world.engine.ranks, 2)
        seconds = world.random.choice((0.2, 5.0, 60.0))
        world.network.end_links(pair[0].name, pair[1].name, seconds)
        return f"presence links between {pair[0].name} and {pair[1].name} for {seconds} s"

    def rejected_in_a_commit(world: Any) -> str:
        """Reject all new traffic to a rank that is late at a commit, as a firewall would. The vote links stay open."""
        victim = world.random.choice(world.engine.ranks)
        seconds = world.random.choice((2.0, 20.0))
        late = world.random.choice((0.4, 1.5, 3.0))

        def begin() -> None:
            for rank in world.engine.ranks:
                world.network.end_links(victim.name, rank.name, seconds)
            world.network.rejected = 1.0
            world.later(seconds, lambda: setattr(world.network, "rejected", 0.0))
            victim.freeze(late, "model")

        world.network.aimed_at_ballots.append(begin)
        return f"{victim.name}, {late} s late, for {seconds} s"

    def outcome_on_one_rank(world: Any) -> str:
        """Let only one rank learn that a layer is committed, and isolate that rank.

        The rank is late, so its peers are already in doubt. A firewall closes the rank's presence links and rejects
        all datagrams. Once the rank has the outcome, the vote link between two of its peers breaks.
        """
        network = world.network
        seconds = world.random.choice((5.0, 60.0, 120.0))

        def begin(first: str) -> None:
            victim = world.random.choice([rank for rank in world.engine.ranks if rank.name != first])
            peer_names = [rank.name for rank in world.engine.ranks if rank is not victim]
            for peer_name in peer_names:
                network.end_links(victim.name, peer_name, seconds)
            network.rejected = 1.0
            world.later(seconds, lambda: setattr(network, "rejected", 0.0))
            victim.freeze(1.5, "model")
            network.aimed.append(lambda: world.later(0.01, lambda: network.cut(*peer_names[:2], 0.5)))

        network.aimed_at_first.append(begin)
        return f"for {seconds} s"

    def cut_and_failing_install(world: Any) -> str:
        """Cut a link at a commit and make the install fail on one of the link's two ranks."""
        pair = world.random.sample(world.engine.ranks, 2)
        seconds = world.random.choice((0.5, 5.0))

        def begin() -> None:
            # The engine may have restarted with different processes before the commit.
            if pair[1] in world.engine.ranks:
                world.network.cut(pair[0].name, pair[1].name, seconds)
                world.engine.failing_installs[world.engine.ranks.index(pair[1])] = 1

        world.network.aimed.append(begin)
        return f"between {pair[0].name} and {pair[1].name} for {seconds} s, and the install fails on {pair[1].name}"

    def abort_and_late_end(world: Any) -> str:
        """Abort a plan while one rank's transfer is still running; that transfer ends only during the next plan."""
        rank = world.rank()
        seconds = world.random.choice((1.0, 4.0, 8.0))
        world.engine.ranks[rank].freeze(seconds, "eplb-transfer")
        aborting_process = world.engine.ranks[(rank + 1) % world.shapes.ranks]
        aborting_process.failing["eplb-transfer"] = world.random.randint(1, 6), MemoryError
        return f"the transfer on rank {rank} ends {seconds} s late, and {aborting_process.name} aborts"

    def exception_anywhere(world: Any) -> str:
        """Raise an error between any two lines of agent code that a rank's model thread runs."""
        rank = world.rank()
        lines = world.random.randint(1, 4000)
        world.engine.ranks[rank].failing_line = lines
        return f"rank {rank} after {lines} lines"

    def exception_in_a_commit(world: Any) -> str:
        rank = world.rank()
        lines = world.random.randint(1, 400)
        process = world.engine.ranks[rank]
        world.network.aimed.append(lambda: setattr(process, "failing_line", lines))
        return f"rank {rank} after {lines} lines"

    def cut_off(world: Any) -> str:
        rank = world.rank()
        seconds = world.random.choice((0.5, 5.0, 20.0))
        world.network.cut(f"rank {rank}", NAME, seconds)
        return f"rank {rank} from the service for {seconds} s"

    def kill(world: Any) -> str:
        rank = world.rank()
        world.excused = True
        world.engine.ranks[rank].kill()
        return f"rank {rank}"

    def kill_service(world: Any) -> str:
        seconds = world.random.choice((0.5, 10.0, 60.0))
        lost = world.random.random() < 0.3
        world.stop_service()
        if lost:
            world.disk.lose()
        world.later(seconds, lambda: world.service or world.start_service())
        return f"{'and lose its store, ' * lost}for {seconds} s"

    def stop_service(world: Any) -> str:
        seconds = world.random.choice((1.0, 20.0))
        if world.service is not None:
            world.service.process.freeze(seconds)
        return f"for {seconds} s"

    def full_disk(world: Any) -> str:
        seconds = world.random.choice((5.0, 60.0))
        world.disk.fill(full=True)
        world.later(seconds, lambda: world.disk.fill(full=False))
        return f"for {seconds} s"

    def withhold(world: Any) -> str:
        if world.service is not None:
            world.service.withheld = 0.3
        return "plans reach only some ranks"

    def call_off(world: Any) -> str:
        """Call off the plan in progress, either immediately or when all ranks are ready to commit a layer."""
        if world.calls.random() < 0.5:
            called = world.service is not None and world.service.call_off()
            return "immediately" if called else "none, because no plan is in progress"
        world.network.aimed_at_ballots.append(lambda: world.service is None or world.service.call_off())
        return "in the next vote for which all ranks are ready"

    def counted_from_zero(world: Any) -> str:
        for counter in world.engine.counters.values():
            counter.zero_()
        return "on all ranks"


FAULTS: dict[str, Callable[[Any], str]] = {
    name.replace("_", " "): fault for name, fault in vars(Faults).items() if not name.startswith("_")
}
"""Faults by name."""
CALL_OFF = "call off"
LONE_OUTCOME = "outcome on one rank"
BEYOND = ("counted twice", "counted from zero")
"""Faults in the model's own pass count, which agents trust. They are only drawn on request."""
