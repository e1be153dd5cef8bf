"""A replay as one HTML file: charts, tables, settings and the command that makes it again; nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from eplb_core.figures import digits
from eplb_service.replay.costs import Assumption
from eplb_service.replay.result import PolicyReplay, Replay, Score
from eplb_service.report.pictures import best_policy, pictures_of

_TERMS = {
    "PAR": "peak-to-average ratio of the rank loads; a MoE layer takes as long as its hottest rank",
    "floor": "about what token sampling alone leaves of a perfectly balanced placement",
    "hindsight": "the best known for the very steps served: a placement fitted on them, or any policy here",
    "regret": "realised PAR above hindsight: what a better forecast could still win",
    "moves": "slots that receive weights per interval, and their part of all slots, over 100 % where several decisions "
    "fall into an interval; GB over all of them",
    "late": "steps served under the old placement while a decision was solved and its weights travelled",
    "saved, stall": "milliseconds of a step that balance saves, and that standing still for switches costs",
}


def report_page(
    replay: Replay, *, title: str, command: str, facts: Mapping[str, str], rests_on: Sequence[Assumption]
) -> str:
    """The whole HTML of a report on ``replay``.

    ``title`` names the trace, ``command`` makes the same report again, ``facts`` are settings and what is known of the
    trace, and ``rests_on`` the costs that decisions and scores go by.
    """
    best = best_policy(replay)
    score = replay.score(best)
    notes = {
        "par.svg": "The hottest rank over the mean rank in each step, mean over steps and layers; 1 is perfect. The "
        "floor is about what chance leaves of the best placement.",
        "ranks.svg": f"Layer by layer, in the steps of the last decision: left alone, and under {best.label}.",
        "layers.svg": f"After each decision: left alone, and under {best.label}.",
        "moves.svg": "Slots that had to receive another expert's weights, from one decision by the clock to the next.",
        "pareto.svg": "Lower and further left is better; the line joins the policies that none beats in both. "
        f"Left alone, PAR is {score.par_left_alone:.3f} and nothing moves.",
    }
    pictures = pictures_of(replay)
    parts = [
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(_shape(replay))}</p>',
        _tiles(replay, score, best),
        f'<p class="verdict">{escape(_verdict(score, best))}</p>',
        _folded(
            "What times and prices rest on", {one.name: f"{one.value} ({one.source})" for one in rests_on}
        ),
        *(_figure(pictures[name], escape(note)) for name, note in notes.items()),
        f"<h2>In figures</h2>\n{_table(replay)}",
        _folded("Terms", _TERMS),
        f"<h2>How this was made</h2>\n<pre>{escape(command)}</pre>\n{_folded('Trace and settings', facts)}",
    ]
    if replay.interrupted:
        parts.insert(
            3, '<p class="verdict">The replay was stopped early: policies not yet done are left out.</p>'
        )
    css = files("eplb_service.report").joinpath("report.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _figure(picture: str, note: str) -> str:
    """A chart as an image of its own, which neither shares names with the page nor runs anything, and its note."""
    title = picture.partition("<title>")[2].partition("</title>")[0]
    data = base64.b64encode(picture.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{title}">'
    return f"<figure>{image}<figcaption>{note}</figcaption></figure>"


def _shape(replay: Replay) -> str:
    slots = " or ".join(str(count) for count in sorted({policy.setup.slots for policy in replay.policies}))
    return (
        f"{replay.layers} layers x {replay.experts} experts on {replay.ranks} ranks x {slots} slots; "
        f"{replay.steps:,} steps scored from step {replay.first:,} on"
    )


def _tiles(replay: Replay, score: Score, best: PolicyReplay) -> str:
    tiles = {
        "PAR left alone": f"{score.par_left_alone:.3f}",
        f"PAR with {best.label}": f"{score.par:.3f}",
        "floor: what chance leaves, about": f"{score.floor:.3f}",
    }
    if score.regret is not None:
        tiles["regret: PAR above hindsight"] = f"{score.regret:.3f}"
    costs, slots = replay.costs, best.setup.slots
    share = 1 - score.par / score.par_left_alone
    tiles["PAR lower than left alone"] = f"{share:.1%}"
    if costs.step_ms and score.net_ms is not None:
        tiles[f"saved of a step of {digits(costs.step_ms)} ms, net, by the stated costs"] = (
            f"{digits(score.net_ms)} ms"
        )
    estimated = costs.estimated_ms(score.par, score.par_left_alone)
    if estimated is not None:
        low, high = (digits(ms, 2) for ms in estimated)
        tiles[
            f"estimate of the time saved in a step of {digits(costs.step_ms)} ms, {costs.ESTIMATE_BASIS}"
        ] = f"{low} to {high} ms"
    if score.moe_ms is not None:
        tiles["slowest ranks of all layers in a step, by the cost curve"] = f"{digits(score.moe_ms)} ms"
    if not costs.layer_assumed:
        switch = f"{digits(costs.stall_ms(slots, 0, 1))} ms per layer switched"
        tiles[f"price of moves: per expert; {switch}"] = f"{digits(costs.stall_ms(slots, 1, 0))} ms"
    boxes = (f"<div><b>{value}</b>{escape(label)}</div>" for label, value in tiles.items())
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _verdict(score: Score, best: PolicyReplay) -> str:
    avoidable = score.par_left_alone - score.floor
    won = score.par_left_alone - score.par
    if best.policy == "none" or won <= 0.005:
        return "Nothing that was tried is better than leaving the experts where they are."
    share = f", {won / avoidable:.0%} of what is avoidable" if avoidable > 0.01 else ""
    if won >= avoidable:
        share = ", as low as token sampling allows"
    return f"{best.label} takes PAR from {score.par_left_alone:.3f} to {score.par:.3f}{share}."


def _table(replay: Replay) -> str:
    """A row per policy, a column per figure; those that nothing is known of are left out."""
    rows = []
    for policy in replay.policies:
        score = replay.score(policy)
        row = {
            "policy": escape(policy.label),
            "PAR": f"{score.par:.3f}",
            "worst layer": f"{policy.par_realised_L.max():.3f}",
            "regret": "" if score.regret is None else f"{score.regret:.3f}",
            "moves": f"{policy.moves_per_interval:,.1f}",
            "slots moved in 100 steps": f"{replay.moved_per_100_steps(policy):.1%}",
            "GB": f"{score.bytes_moved / 1e9:,.2f}",
            "late": f"{policy.total('late'):,}",
            "solve ms": f"{policy.seconds_mean * 1e3:,.1f}",
        }
        if not replay.costs.bytes_per_expert:
            del row["GB"]
        if replay.costs.step_ms and score.saved_ms is not None:
            row |= {"saved ms": digits(score.saved_ms), "stall ms": digits(score.stall_ms)}
        rows.append(row)
    head = _cells("th", map(escape, rows[0]))
    body = "".join(f"<tr>{_cells('td', row.values())}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _folded(summary: str, facts: Mapping[str, str]) -> str:
    return f"<details><summary>{escape(summary)}</summary>{_facts(facts)}</details>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(rows)}</dl>"
