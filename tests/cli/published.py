"""Keys that commands print with ``--json``. Scripts read them, so a removed or renamed key fails a test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

FIT = "samples held_out median_error p90_error worst_error"
CURVE = "phase floor_us read_us launch_us slope_us_per_token source fit batch_us_per_token"
SPLIT = "us"
TRACE = (
    "origin steps layers experts first_step last_step model ranks slots tokens_per_step top_k bytes_per_expert nodes_R "
    "layer_numbers split phases batching counted_by"
)
SETUP = "slots window interval start"
FIGURES = (
    f"label policy {SETUP} par par_left_alone floor hindsight regret par_planned moves moves_per_interval "
    "bytes_moved moe_ms moe_ms_left_alone saved_ms stall_ms solve_ms_mean solve_ms_max"
)
ADVISED = "label setup move_price par moved_per_100_steps net_ms moe_ms bytes_per_rank par_D"
COPY = {"": "out steps layers experts"}
ASSUMPTIONS = {"assumptions": "name value source"}
KEYS: dict[str, dict[str, str]] = {
    "solve": {
        "": "policy steps layers experts ranks slots par_before par_after par_after_fixed_tables par_after_split_even "
        "ms_before ms_after ms_by_tables split_ms split moves solve_ms par_before_L "
        "par_after_L hottest_before_L hottest_after_L hottest_after_split_even_L moves_L verdicts",
        "split": SPLIT,
    },
    "replay": {
        "": "layers experts ranks first steps interrupted costs assumptions policies",
        "costs": "step_ms solve_ms link_bandwidth link_share model_layers bytes_per_expert commit_ms layer_ms "
        "move_price curve split layer_assumed",
        "costs.curve": CURVE,
        "costs.curve.fit": FIT,
        "costs.split": SPLIT,
        "policies.*": f"{FIGURES} par_L decisions",
        "policies.*.decisions": "step steps late layers_changed layers_moved moves moves_busiest par_seen par_planned "
        "forecasts forecasts_held par seconds decisions",
        **ASSUMPTIONS,
    },
    "prove": {
        "": "layers experts ranks first steps slots window interval blocks arms conclusions answers measured "
        "assumptions",
        "arms": "arm note par gain abba share above_ours moe_ms saved_ms moves bytes_moved",
        **{f"arms.{name}": "value low high" for name in ("gain", "abba", "share", "above_ours", "saved_ms")},
        "answers": "requests equal tokens only_in_one difference",
        **ASSUMPTIONS,
    },
    "sweep": {"": "interrupted assumptions rows", "rows": f"{FIGURES} trace settings", **ASSUMPTIONS},
    "advise": {
        "": "pays share ranks_worth ranks redundant_bytes_per_rank net_ms tokens_per_second tokens_per_second_won "
        "reasons par_left_alone par floor redundant moe_ms_left_alone chosen by_redundancy by_schedule "
        "by_moves gain_L assumptions",
        **dict.fromkeys(("chosen", "by_redundancy", "by_schedule", "by_moves"), ADVISED),
        "chosen.setup": SETUP,
        **ASSUMPTIONS,
    },
    "bench": {
        "": "layers experts ranks slots window_steps decisions noise_floor policies failures",
        "policies.*": "source par_realised par_realised_per_window moves_per_decision moves layers_changed "
        "solve_ms_mean cpu_ms_mean",
        "failures": "policy why",
    },
    "calibrate": {"": CURVE, "fit": FIT},
    "trace record": {"": "out steps lost_steps dropped_reports"},
    "trace info": {"": TRACE},
    "trace stats": {
        "": f"{TRACE} window choices_L hottest_L top_tenth_L drift_L drift_noise_L par_L floor_L par_served_L"
    },
    "trace convert": COPY,
    "trace slice": COPY,
    "trace synth": COPY,
    "demo": {
        "": "par_static par_balanced par_noise_floor "
        "scored_from_step layers_switched experts_moved bytes_moved max_abs_output_diff float32_rounding_bound step_ms "
        "agent_ms step_ms_mean gain_ms tokens_per_second device steps ranks layers",
        "?": "generated_bytes generated_bytes_identical",
        "step_ms": "with_agent without_agent",
        "step_ms.with_agent": "p50 p99",
        "step_ms.without_agent": "p50 p99",
        "agent_ms": "p50 p99",
        "step_ms_mean": "with_agent without_agent agent",
        "tokens_per_second": "with_agent without_agent",
    },
    "placement": {"": "epoch phy2log log2phy"},
    "pause": {"": "deployment paused"},
    "resume": {"": "deployment paused"},
    "lead": {"": "deployment leader_term raised"},
    "forget": {"": "deployment forgotten"},
}
"""Keys of the objects in each command's document, by path. ``*`` stands for any name, and ``?`` lists optional keys."""
OF_SERVICE = ("deployments", "status", "history", "rebalance")
"""Commands that print the service's response field by field (``wire/document.py``)."""


def checked_document(command: str, printed: str) -> Any:
    """Parse the document that a command printed, check its keys against ``KEYS``, and return it."""
    document = json.loads(printed)
    keys_by_path = dict(KEYS[command]) if command not in OF_SERVICE else {}
    optional = set(keys_by_path.pop("?", "").split())
    for path, keys in keys_by_path.items():
        for item in _objects(document, path.split(".") if path else []):
            assert set(item) - (optional if not path else set()) == set(keys.split()), (command, path)
    return document


def _objects(value: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path in a document. A ``null`` on the path yields nothing."""
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, path)
    elif value is not None and not path:
        yield value
    elif value is not None:
        for child in value.values() if path[0] == "*" else [value[path[0]]]:
            yield from _objects(child, path[1:])
