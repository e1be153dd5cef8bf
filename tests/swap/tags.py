"""Plans and placements reduced to tags, so that the explored world's state consists of only a few dozen integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class TagLayer(NamedTuple):
    """One layer of a plan: its index, and the tag for its new weights and tables."""

    layer: int
    phy2log_RS: int
    log2phy_E: int


class TagPlan(NamedTuple):
    """A plan whose placements are tags."""

    plan_id: int
    leader_term: int
    base_epoch: int
    base_digest: int
    layers: tuple[TagLayer, ...]

    @property
    def digest(self) -> int:
        return self.plan_id

    @property
    def moved_LC(self) -> npt.NDArray[np.int64]:
        """Number of experts that move in each layer: one expert, to one rank."""
        return np.ones((len(self.layers), 1), dtype=np.int64)


@dataclass(frozen=True)
class TagInstalled:
    """A rank's layout: one tag per layer."""

    epoch: int
    tags: tuple[int, ...]

    @cached_property
    def digest(self) -> int:
        return 1000 + self.tags[0] * 100 + self.tags[1] * 10 + self.tags[2]

    @cached_property
    def version_digest(self) -> int:
        return self.digest + 100_000 * self.epoch

    @property
    def layer_epochs(self) -> tuple[int, ...]:
        return (self.epoch,)

    def with_layer(self, layer: int, tag: int, _: int) -> TagInstalled:
        tags = (*self.tags[:layer], tag, *self.tags[layer + 1 :])
        return TagInstalled(self.epoch + 1, tags)


FIRST = TagInstalled(0, (0, 0, 0))


def plan_from(base: TagInstalled, plan_id: int, term: int, *layers: int) -> TagPlan:
    """Return a plan that tags each of ``layers`` with the plan's number."""
    tagged = tuple(TagLayer(layer, plan_id, plan_id) for layer in layers)
    return TagPlan(plan_id, term, base.epoch, base.digest, tagged)
