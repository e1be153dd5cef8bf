"""HTML report of a replay: charts, tables, settings, and the command that reproduces it.

The file is self-contained and loads no external resources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from eplb_core.figures import digits
from eplb_service.replay.costs import Assumption, Costs
from eplb_service.replay.result import PolicyReplay, Replay, Score
from eplb_service.report.html import document, figure, folded, table, tiles, verdict
from eplb_service.report.pictures import best_policy, pictures_of

_TERMS = {
    "PAR": "peak-to-average ratio of the rank loads; a MoE layer takes as long as its hottest rank",
    "floor": "PAR that token sampling gives a perfectly balanced placement, approximately",
    "hindsight": "the best known result for the scored steps themselves: a placement fitted to them, or the best "
    "policy of this replay",
    "regret": "realised PAR minus hindsight: the further gain that a better forecast could bring",
    "moves": "slots that receive weights per interval, and their fraction of all slots, which exceeds 100 % if an "
    "interval has several decisions; GB: the weights of all moves",
    "late": "steps served with the old placement while a decision was computed and its weights were transferred",
    "saved, stall": "milliseconds per step that balancing saves, and that pauses for switches cost",
}


def report_page(
    replay: Replay, *, title: str, command: str, facts: Mapping[str, str], assumptions: Sequence[Assumption]
) -> str:
    """Return the HTML report of a replay.

    Parameters
    ----------
    replay
        Replay with at least one policy.
    title
        Title of the report, which names the trace.
    command
        Command that reproduces the report.
    facts
        Facts about the trace and the settings.
    assumptions
        Assumed costs that decisions and scores are based on.

    Returns
    -------
    str
        The HTML document.
    """
    best = best_policy(replay)
    score = replay.score(best)
    notes = {
        "par.svg": "Load of the hottest rank over the mean rank load in each step, averaged over steps and layers; 1 "
        "is perfect. The floor is approximately the PAR that token sampling gives a perfectly balanced placement.",
        "ranks.svg": f"By layer, in the steps of the last decision: with the initial placement, and with {best.label}.",
        "layers.svg": f"After each decision: with the initial placement, and with {best.label}.",
        "moves.svg": "Slots that received another expert's weights, per interval.",
        "pareto.svg": "Down and to the left is better. The line connects the policies that no other policy beats on "
        f"both axes. With the initial placement, PAR is {score.par_left_alone:.3f} and nothing moves.",
    }
    pictures = pictures_of(replay)
    assumed_costs = {
        assumption.name: f"{assumption.value} ({assumption.source})" for assumption in assumptions
    }
    sections = [
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(_shape(replay))}</p>',
        _tiles(replay, score, best),
        verdict(_verdict(score, best)),
    ]
    if replay.interrupted:
        sections.append(verdict("The replay was stopped early; unfinished policies are omitted."))
    sections += [
        folded("Assumptions behind times and prices", assumed_costs),
        *(figure(pictures[name], note) for name, note in notes.items()),
        f"<h2>Figures</h2>\n{_table(replay)}",
        folded("Terms", _TERMS),
        f"<h2>How to reproduce this report</h2>\n<pre>{escape(command)}</pre>\n{folded('Trace and settings', facts)}",
    ]
    return document(title, sections)


def _shape(replay: Replay) -> str:
    slots = " or ".join(str(count) for count in sorted({policy.setup.slots for policy in replay.policies}))
    return (
        f"{replay.layers} layers x {replay.experts} experts on {replay.ranks} ranks x {slots} slots; "
        f"{replay.steps:,} steps scored from step {replay.first:,} onward"
    )


def _tiles(replay: Replay, score: Score, best: PolicyReplay) -> str:
    """Return the main figures as tiles."""
    values = {
        "PAR with the initial placement": f"{score.par_left_alone:.3f}",
        f"PAR with {best.label}": f"{score.par:.3f}",
        "floor: PAR that token sampling leaves, approximately": f"{score.floor:.3f}",
    }
    if score.regret is not None:
        values["regret: PAR above hindsight"] = f"{score.regret:.3f}"
    reduction = 1 - score.par / score.par_left_alone
    values["PAR lower than with the initial placement"] = f"{reduction:.1%}"
    return tiles(values | _time_tiles(replay.costs, score, best.setup.slots))


def _time_tiles(costs: Costs, score: Score, slots: int) -> dict[str, str]:
    """Return the times and costs that are known, in milliseconds, keyed by label."""
    values = {}
    if costs.step_ms and score.net_ms is not None:
        label = f"net saving per {digits(costs.step_ms)} ms step, according to the stated costs"
        values[label] = f"{digits(score.net_ms)} ms"
    estimate = costs.estimated_ms(score.par, score.par_left_alone)
    if estimate is not None:
        low, high = (digits(ms, 2) for ms in estimate)
        label = f"estimated saving per {digits(costs.step_ms)} ms step, {costs.ESTIMATE_BASIS}"
        values[label] = f"{low} to {high} ms"
    if score.moe_ms is not None:
        label = "slowest ranks of all layers per step, according to the cost curve"
        values[label] = f"{digits(score.moe_ms)} ms"
    if not costs.layer_assumed:
        switch_ms = digits(costs.stall_ms(slots, 0, 1))
        label = f"move price per expert; {switch_ms} ms per switched layer"
        values[label] = f"{digits(costs.stall_ms(slots, 1, 0))} ms"
    return values


def _verdict(score: Score, best: PolicyReplay) -> str:
    avoidable = score.par_left_alone - score.floor
    gain = score.par_left_alone - score.par
    if best.policy == "none" or gain <= 0.005:
        return "No policy does better than the initial placement."
    share = f", {gain / avoidable:.0%} of the avoidable imbalance" if avoidable > 0.01 else ""
    if gain >= avoidable:
        share = ", as low as token sampling allows"
    return f"{best.label} lowers PAR from {score.par_left_alone:.3f} to {score.par:.3f}{share}."


def _table(replay: Replay) -> str:
    """Return the table of figures, with a row for each policy. Columns whose figures are all unknown are omitted."""
    rows = []
    for policy in replay.policies:
        score = replay.score(policy)
        row = {
            "policy": policy.label,
            "PAR": f"{score.par:.3f}",
            "worst layer": f"{policy.par_realised_L.max():.3f}",
            "regret": "" if score.regret is None else f"{score.regret:.3f}",
            "moves": f"{policy.moves_per_interval:,.1f}",
            "slots moved per 100 steps": f"{replay.moved_per_100_steps(policy):.1%}",
            "GB": f"{score.bytes_moved / 1e9:,.2f}",
            "late": f"{policy.total('late'):,}",
            "solve ms": f"{policy.seconds_mean * 1e3:,.1f}",
        }
        if not replay.costs.bytes_per_expert:
            del row["GB"]
        if replay.costs.step_ms and score.saved_ms is not None:
            row |= {"saved ms": digits(score.saved_ms), "stall ms": digits(score.stall_ms)}
        rows.append(row)
    return table(rows)
