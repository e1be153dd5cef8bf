"""Placements of experts in slots: validation, tables, digests and the peak-to-average ratio. Requires only numpy."""

from eplb_core.placement.foreign import EMPTY, as_served, checked_foreign, repaired
from eplb_core.placement.par import Float64, mean_par, par, peak_par, step_par
from eplb_core.placement.parts import part_end, staging_rows
from eplb_core.placement.placement import (
    Placement,
    apply_layers,
    array_digest,
    combine_digests,
    layer_digest,
)
from eplb_core.placement.tables import (
    MAX_ENTRIES,
    Int32,
    PlacementError,
    check_layer,
    check_log2phy,
    check_shape,
    check_tables_follow,
    dealt_to,
    default_log2phy,
    drawn_by_row,
    expert_map,
    with_entries,
    without_single_entries,
)

__all__ = [
    "EMPTY",
    "MAX_ENTRIES",
    "Float64",
    "Int32",
    "Placement",
    "PlacementError",
    "apply_layers",
    "array_digest",
    "as_served",
    "check_layer",
    "check_log2phy",
    "check_shape",
    "check_tables_follow",
    "checked_foreign",
    "combine_digests",
    "dealt_to",
    "default_log2phy",
    "drawn_by_row",
    "expert_map",
    "layer_digest",
    "mean_par",
    "par",
    "part_end",
    "peak_par",
    "repaired",
    "staging_rows",
    "step_par",
    "with_entries",
    "without_single_entries",
]
