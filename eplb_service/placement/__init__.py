"""Which expert is in which slot, whether that can be served, and how evenly it shares the tokens; numpy alone."""

from eplb_service.placement.apply import apply_layers, check_tables_follow
from eplb_service.placement.dealing import (
    MOST_ENTRIES,
    dealing_width,
    dealt_log2phy,
    dealt_to,
    even_log2phy,
    repeated_entries,
    with_entries,
    without_single_entries,
)
from eplb_service.placement.digests import array_digest, combine_digests, layer_digest
from eplb_service.placement.par import Float64, mean_par, par, peak_par, step_par
from eplb_service.placement.placement import Placement, default_log2phy, expert_map, replica_counts
from eplb_service.placement.validity import Int32, PlacementError, check_layer, check_log2phy, check_shape

__all__ = [
    "MOST_ENTRIES",
    "Float64",
    "Int32",
    "Placement",
    "PlacementError",
    "apply_layers",
    "array_digest",
    "check_layer",
    "check_log2phy",
    "check_shape",
    "check_tables_follow",
    "combine_digests",
    "dealing_width",
    "dealt_log2phy",
    "dealt_to",
    "default_log2phy",
    "even_log2phy",
    "expert_map",
    "layer_digest",
    "mean_par",
    "par",
    "peak_par",
    "repeated_entries",
    "replica_counts",
    "step_par",
    "with_entries",
    "without_single_entries",
]
