"""A replay as one HTML file: charts, tables, settings and the command that makes it again; nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import numpy as np

from eplb_service.replay.result import PolicyReplay, Replay, Score
from eplb_service.report.charts import Charts, Line, theme_variables


def report_page(replay: Replay, *, title: str, command: str, facts: Mapping[str, str]) -> str:
    """The whole HTML of a report.

    ``title`` names the trace, ``command`` is what makes the same report again, and ``facts`` are settings and what is
    known of the trace, for the report to list.
    """
    charts = Charts(replay)
    light, dark = theme_variables()
    body = [
        _head(replay, charts.best, title),
        *_pictures(replay, charts),
        _section("In figures", "", _table(replay, charts)),
        _section("How this was made", "", f"<pre>{escape(command)}</pre>", _facts(facts)),
        _section("Terms", "", _facts(_TERMS)),
    ]
    of_charts, css, js = (
        files("eplb_service.report").joinpath(name).read_text()
        for name in ("charts.css", "report.css", "report.js")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{of_charts}{css}:root{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + '\n<div id="tip" role="status"></div>\n'
        + f'<script type="application/json" id="data">{_data(charts)}</script>\n'
        + f"<script>\n{js}</script>\n</body>\n</html>\n"
    )


def _pictures(replay: Replay, charts: Charts) -> list[str]:
    """A section for each chart."""
    return [
        _section(
            "Balance along the trace",
            "Peak-to-average ratio of the steps that each decision served: the hottest rank over the mean rank in each "
            "step, mean over steps and layers. 1 is perfect. The floor is about what chance leaves; real routers vary "
            "a little less than chance, so that a good placement may lie below it.",
            _legend(charts.lines),
            _wide(charts.par),
        ),
        _section(
            "Ranks before and after",
            "Tokens of each rank over the mean rank, layer by layer, in the steps of the last decision: experts as "
            f"they were at the start, and as {charts.best.label} has them.",
            charts.colour_bar,
            _pair(charts, "before", "after"),
        ),
        _section(
            "Layers over time",
            f"Each layer's PAR after each decision, in the same colours: left alone, and under {charts.best.label}.",
            _pair(charts, "alone", "balanced"),
        ),
        _section(
            "What balance costs",
            "Slots that had to receive another expert's weights at each decision, all policies on one scale.",
            _wide(charts.moves),
        ),
        _section(
            "Balance against moves",
            "Lower and further left is better; the line joins the policies that none beats in both. "
            f"Left alone, PAR is {replay.score(charts.best).par_left_alone:.3f} and nothing moves. Each dot has its "
            "name and figures under the mouse.",
            _wide(charts.pareto),
        ),
    ]


_TERMS = {
    "PAR": "peak-to-average ratio of the rank loads; a MoE layer takes as long as its hottest rank",
    "floor": "about what token sampling alone leaves of a perfectly balanced placement",
    "hindsight": "the best known for the very steps served: a placement fitted on them, or any policy here",
    "regret": "realised PAR above hindsight: what a better forecast could still win",
    "moves": "slots that receive weights at a decision, and their part of all slots; GB over all decisions",
    "late": "steps served under the old placement while a decision was solved and its weights travelled",
    "saved, stall": "milliseconds of a step that balance saves, and that standing still for switches costs",
}


def _head(replay: Replay, best: PolicyReplay, title: str) -> str:
    score = replay.score(best)
    slots = " or ".join(str(count) for count in sorted({policy.setup.slots for policy in replay.policies}))
    shape = (
        f"{replay.layers} layers x {replay.experts} experts on {replay.ranks} ranks x {slots} slots; "
        f"{replay.steps:,} steps scored from step {replay.first:,} on"
    )
    tiles = [
        (f"{score.par_left_alone:.3f}", "PAR left alone"),
        (f"{score.par:.3f}", f"PAR with {best.label}"),
        (f"{score.floor:.3f}", "floor: what chance leaves, about"),
    ]
    if score.regret is not None:
        tiles.append((f"{score.regret:.3f}", "regret: PAR above hindsight"))
    if replay.costs.step_ms:
        tiles.append(
            (f"{score.saved_ms - score.stall_ms:.2f} ms", f"net of a step of {replay.costs.step_ms:g} ms")
        )
    boxes = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(label)}</span></div>' for value, label in tiles
    )
    stopped = (
        '<p class="verdict stopped">The replay was stopped early: every policy is shown up to the same decision.</p>'
        if replay.interrupted
        else ""
    )
    return (
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(shape)}</p>\n<div class="tiles">{boxes}</div>\n'
        f'<p class="verdict">{escape(_verdict(score, best))}</p>{stopped}'
    )


def _verdict(score: Score, best: PolicyReplay) -> str:
    avoidable = score.par_left_alone - score.floor
    won = score.par_left_alone - score.par
    if best.policy == "none" or won <= 0.005:
        return "Nothing that was tried is better than leaving the experts where they are."
    share = f", {won / avoidable:.0%} of what is avoidable" if avoidable > 0.01 else ""
    if won >= avoidable:
        share = ", as low as token sampling allows"
    return f"{best.label} takes PAR from {score.par_left_alone:.3f} to {score.par:.3f}{share}."


def _section(heading: str, note: str, *content: str) -> str:
    lead = f'<p class="soft">{escape(note)}</p>\n' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{lead}" + "\n".join(content) + "\n</section>"


def _wide(chart: str) -> str:
    """A chart that scrolls sideways where the screen is too narrow to read it."""
    return f'<div class="scroll wide">{chart}</div>'


def _pair(charts: Charts, *names: str) -> str:
    boxes = []
    for name in names:
        heading, column, _ = charts.maps[name]
        drawn = charts.heat_map(name, f"{heading}: each layer by {column}", "layer")
        boxes.append(f"<div><h3>{escape(heading)}</h3>{drawn}</div>")
    return f'<div class="pair">{"".join(boxes)}</div>'


def _legend(lines: Sequence[Line]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{escape(line.name, quote=True)}">'
        f'<i class="{line.colour}"></i>{escape(line.name)}</button>'
        for line in lines
    )
    return f'<div class="legend">{buttons}</div>'


def _table(replay: Replay, charts: Charts) -> str:
    gigabytes = ["GB"] if replay.costs.bytes_per_expert else []
    heads = ["policy", "PAR", "worst layer", "avoidable", "regret", "moves", "of slots"]
    heads += [*gigabytes, "late", "solve ms"]
    if replay.costs.step_ms:
        heads += ["saved ms", "stall ms"]
    rows = []
    for policy in replay.policies:
        score = replay.score(policy)
        cells = [
            f'<i class="{charts.colours[policy.label]}"></i>{escape(policy.label)}',
            f"{score.par:.3f}",
            f"{policy.par_realised_L.max():.3f}",
            f"{score.avoidable:.3f}",
            "" if score.regret is None else f"{score.regret:.3f}",
            f"{policy.moves_per_decision:,.1f}",
            f"{charts.moved_share(policy):.1%}",
            *(f"{score.bytes_moved / 1e9:,.2f}" for _ in gigabytes),
            f"{sum(decision.late for decision in policy.decisions):,}",
            f"{policy.seconds_mean * 1e3:.1f}",
        ]
        if replay.costs.step_ms:
            cells += [f"{score.saved_ms:.3f}", f"{score.stall_ms:.3f}"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _data(charts: Charts) -> str:
    """The charts' figures for the page's script."""
    first, last = min(line.steps[0] for line in charts.lines), charts.span[1]
    lines = [
        {
            "name": line.name,
            "steps": list(line.steps),
            "values": [round(value, 4) for value in line.values],
        }
        for line in charts.lines
    ]
    maps = {
        name: {"column": column, "values": np.round(values, 3).tolist()}
        for name, (_, column, values) in charts.maps.items()
    }
    data = {"par": {"left": 56, "right": 944, "first": first, "last": last, "lines": lines}, "maps": maps}
    # A "</script>" in a policy's name must not end the script.
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
