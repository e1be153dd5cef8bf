"""The registry of attacks by strangers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tests.attacks.target import Target


@dataclass(frozen=True)
class Attempt:
    """One attempt and the guarantee that it checks.

    ``run`` fails if the attempt does harm, and returns a description of the outcome. ``locked`` attempts run against a
    service that requires credentials.
    """

    name: str
    proves: str
    locked: bool
    run: Callable[[Target], Awaitable[str]]


ATTEMPTS: list[Attempt] = []


def attempt(name: str, proves: str, *, locked: bool = False) -> Callable[[Any], Any]:
    """Register the decorated function as an attempt."""

    def listed(run: Callable[[Target], Awaitable[str]]) -> Callable[[Target], Awaitable[str]]:
        ATTEMPTS.append(Attempt(name, proves, locked, run))
        return run

    return listed


def register_rejections(
    expected: grpc.StatusCode,
    proves: str,
    calls: dict[str, Callable[[Target], Awaitable[Any]]],
    *,
    locked: bool = False,
) -> None:
    """Register named attempts that check one guarantee; each must end with the status ``expected``."""
    for name, call in calls.items():

        async def run(target: Target, call: Callable[[Target], Awaitable[Any]] = call) -> str:
            code = await call(target)
            assert code is expected, f"expected {expected}, got {code}"
            return f"rejected: {code.name}"

        ATTEMPTS.append(Attempt(name, proves, locked, run))
