"""Sheds heat where a service cannot take all of it: the ranks leave out the same steps, so that the others are whole.

Left to themselves, ranks of which each drops what it cannot send in time would drop different steps, and hardly any
would be whole: of 1,024 ranks that send nine of ten reports, all have the same one once in 10^47.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eplb_service.wire.reporting import MOST_BLOCKS

_LOOK_SECONDS = 10.0
"""From one look to the next: an idle model's ranks report seldom."""
_STRIKES = 2
"""Looks in a row that must find ranks dropping heat: what they dropped while the service was away counts once."""
_CALM_SECONDS = 60.0
_MOST_CALM_SECONDS = 3600.0


@dataclass(frozen=True)
class Shedding:
    """How much heat the ranks of a deployment are asked for; a value.

    Parameters
    ----------
    one_in
        Of so many blocks of steps they report one.
    looked_at
        When the ranks were last looked at; ``None`` before the first look.
    dropped
        Steps that each rank had dropped by then.
    strikes
        Looks in a row that found most ranks dropping heat.
    calm_since
        Since when none did.
    calm_seconds
        How long that must last before they are asked for more; doubles where it was too much.
    """

    one_in: int = 1
    looked_at: float | None = None
    dropped: Mapping[int, int] = field(default_factory=dict)
    strikes: int = 0
    calm_since: float = 0.0
    calm_seconds: float = _CALM_SECONDS

    def after(self, now: float, dropped: Mapping[int, int]) -> Shedding:
        """Each connected rank has dropped so many steps by now."""
        if self.looked_at is None:
            return replace(self, looked_at=now, dropped=dict(dropped), calm_since=now)
        if now - self.looked_at < _LOOK_SECONDS:
            return self
        dropping = sum(steps > self.dropped.get(rank, steps) for rank, steps in dropped.items())
        looked = replace(self, looked_at=now, dropped=dict(dropped))
        if 2 * dropping > len(dropped):
            return looked._struck(now)
        if dropping:
            return replace(looked, strikes=0, calm_since=now)
        return looked._calm(now)

    def _struck(self, now: float) -> Shedding:
        strikes = self.strikes + 1
        if strikes < _STRIKES or self.one_in == MOST_BLOCKS:
            return replace(self, strikes=strikes, calm_since=now)
        # Asked for less before, and for more since: that was too early.
        patience = min(2 * self.calm_seconds, _MOST_CALM_SECONDS)
        return replace(self, one_in=2 * self.one_in, strikes=0, calm_since=now, calm_seconds=patience)

    def _calm(self, now: float) -> Shedding:
        if self.one_in == 1 or now - self.calm_since < self.calm_seconds:
            return replace(self, strikes=0)
        return replace(self, one_in=self.one_in // 2, strikes=0, calm_since=now)
