"""A byte budget admits what the steps allow."""

from __future__ import annotations

import threading
import time

from worker_agent.swap.carrier import ByteBudget


def test_a_budget_admits_what_the_steps_allow() -> None:
    budget = ByteBudget(100)
    assert not budget.draw(10, timeout=0.01)
    budget.refill()
    assert budget.draw(250, timeout=0.01)
    budget.refill()
    assert not budget.draw(1, timeout=0.01)
    waited = threading.Thread(target=lambda: (time.sleep(0.05), budget.refill(), budget.refill()))
    waited.start()
    assert budget.draw(1, timeout=5)
    waited.join()


def test_no_budget_never_waits() -> None:
    assert ByteBudget(None).draw(1 << 40, timeout=0)
