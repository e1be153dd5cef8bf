"""HTML page of a proof: the figures, the method and its limits in one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle

from eplb_core.figures import digits, size_text
from eplb_service.replay.answers import Answers
from eplb_service.replay.costs import Assumption
from eplb_service.replay.proof import BLOCKS, FORCED, OFF, OURS, Estimate, Proof
from eplb_service.report.html import bullets, document, figure, folded, table, tiles, verdict
from eplb_service.report.svg import Line, Look, lines_over_steps

_COLOURS = ("#2463be", "#d4691a", "#15803d", "#a21caf", "#b91c1c", "#0e7490")
_GREY = {OFF: Look("#8a8d91"), FORCED: Look("#8a8d91", "2 3")}


def proof_page(
    proof: Proof,
    *,
    title: str,
    command: str,
    facts: Mapping[str, str],
    assumptions: Sequence[Assumption],
    answers: Answers | None = None,
    measured: str = "",
) -> str:
    """Return the HTML page of a proof.

    Parameters
    ----------
    proof
        Scored arms.
    title
        Title of the page, which names the trace or the deployment.
    command
        Command that reproduces the page.
    facts
        Facts about the trace and the settings.
    assumptions
        Assumed costs that decisions and times are based on.
    answers
        Comparison of the answers of two runs; ``None`` if they were not compared.
    measured
        Gain in time that a running service measured, as text; empty if there is none.

    Returns
    -------
    str
        The HTML document.
    """
    by_arm = {row["arm"]: row for row in proof.rows()}
    main = {
        "PAR with the initial placement": f"{by_arm[OFF]['par']:.3f}",
        "PAR with our planner": f"{by_arm[OURS]['par']:.3f}",
        "of the gain of forced balance": share_text(by_arm[OURS]["share"]),
        "experts moved by our planner": f"{by_arm[OURS]['moves']:,}",
    }
    costs = {assumption.name: f"{assumption.value} ({assumption.source})" for assumption in assumptions}
    notes = {row["arm"]: row["note"] for row in by_arm.values()}
    sections = [
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(shape_text(proof))}</p>',
        tiles(main),
        *(verdict(line) for line in conclusions(proof, answers, measured)),
        table(text_rows(proof)),
        folded("Arms", notes),
        figure(
            _chart(proof),
            "Load of the hottest rank over the mean rank load, averaged over the layers and the steps of each block.",
        ),
        bullets("How this was measured, and its limits", method(proof)),
        folded("Assumptions behind times and prices", costs),
        f"<h2>How to reproduce this page</h2>\n<pre>{escape(command)}</pre>\n{folded('Trace and settings', facts)}",
    ]
    return document(title, sections)


def shape_text(proof: Proof) -> str:
    """Return the shape of the deployment and the number of scored steps."""
    replay = proof.replay
    return (
        f"{replay.layers} layers x {replay.experts} experts on {replay.ranks} ranks x {proof.setup.slots} slots; "
        f"{replay.steps:,} steps scored from step {replay.first:,} onward, in {BLOCKS} blocks"
    )


def text_rows(proof: Proof) -> list[dict[str, str]]:
    """Return the table of figures as text, a row for each arm. Columns without any figure are omitted."""
    rows = [
        {
            "arm": row["arm"],
            "PAR": f"{row['par']:.3f}",
            "gain": _text(row["gain"]),
            "ABBA": _text(row["abba"]),
            "share": share_text(row["share"]),
            "MoE ms": "-" if row["moe_ms"] is None else digits(row["moe_ms"]),
            "saved ms": _text(row["saved_ms"]),
            "moves": "-" if row["moves"] is None else f"{row['moves']:,}",
            "weights": size_text(row["bytes_moved"]) if row["bytes_moved"] else "-",
        }
        for row in proof.rows()
    ]
    used = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return [{name: row[name] for name in used} for row in rows]


def conclusions(proof: Proof, answers: Answers | None = None, measured: str = "") -> Iterator[str]:
    """Yield the conclusions, each in one or two sentences.

    Parameters
    ----------
    proof
        Scored arms.
    answers
        Comparison of the answers of two runs; ``None`` if they were not compared.
    measured
        Gain in time that a running service measured, as text; empty if there is none.

    Yields
    ------
    str
        Text without markup.
    """
    rows = {row["arm"]: row for row in proof.rows()}
    ours = rows[OURS]
    if not ours["gain"].low > 0:
        yield (
            "These steps do not show a gain: the 95 % interval of our planner's gain in PAR, "
            f"{_text(ours['gain'])}, contains 0."
        )
    else:
        yield (
            f"Our planner lowers PAR from {rows[OFF]['par']:.3f} to {ours['par']:.3f}, which is "
            f"{share_text(ours['share'])} of the gain of forced balance. It moves {ours['moves']:,} experts."
        )
    for row in rows.values():
        if row["arm"] in (OFF, OURS, FORCED):
            continue
        apart = row["above_ours"]
        how = f"{_text(apart)} above ours"
        if not abs(apart.value) > apart.high - apart.value:
            how = f"not distinguishable from ours ({_text(apart)})"
        yield f"{row['arm']}: PAR {row['par']:.3f}, {how}; {row['moves']:,} experts moved."
    if measured:
        yield measured
    if answers is not None:
        yield f"Tokens: {answers}."


def method(proof: Proof) -> Iterator[str]:
    """Yield the method and the limits of a proof, one paragraph at a time."""
    replay = proof.replay
    yield (
        "Every arm serves every step of the same recorded heat. Its decisions use only past steps, and it is scored "
        f"on the steps after each decision. The first {replay.first:,} steps are the first window and are not scored."
    )
    yield (
        f"The scored steps form {BLOCKS} blocks of consecutive steps. A gain is the mean reduction of PAR "
        "between two arms on the same block. The figure after ± is half of its 95 % interval: Student's t over the "
        "blocks, widened if neighbouring blocks are correlated."
    )
    yield (
        "ABBA is the same gain if only one arm could serve at a time, as on a live system. In each group of four "
        "blocks, the arms serve in the order off, arm, arm, off, so that a steady trend of the load cancels."
    )
    yield (
        "Forced balance deals each step's tokens out evenly to the ranks. It would change the model's tokens, so it is "
        "computed and never run. Share is an arm's gain divided by that of forced balance. Because of token sampling, "
        f"no placement with tables has a PAR below about {_floor(proof):.3f}."
    )
    if replay.costs.curve is None:
        yield "A trace without a cost curve (--cost-curve) says nothing about milliseconds."
    else:
        yield (
            "MoE ms is the time of the slowest ranks of all layers per step according to the cost curve. It is not "
            "measured."
        )
    if not replay.costs.step_ms:
        yield "Placements take effect at once, because the time of a step (--step-ms) is not stated."
    yield (
        "The command only reads: it does not pause or change a deployment. 'as served' is the recorded balance. Every "
        "other arm is computed from the recorded heat, which does not depend on the placement."
    )


def share_text(estimate: Estimate | None) -> str:
    """Return a share with its interval in percent."""
    if estimate is None or math.isnan(estimate.value):
        return "-"
    reach = estimate.high - estimate.value
    return f"{estimate.value:.0%}" + ("" if math.isnan(reach) else f" ±{reach:.0%}")


def _text(estimate: Estimate | None) -> str:
    """Return an estimate with its interval."""
    if estimate is None:
        return "-"
    reach = estimate.high - estimate.value
    return f"{estimate.value:.3f}" + ("" if math.isnan(reach) else f" ±{reach:.3f}")


def _floor(proof: Proof) -> float:
    return min(proof.replay.score(policy).floor for policy in proof.replay.policies)


def _chart(proof: Proof) -> str:
    colours = cycle(_COLOURS)
    lines = [
        Line(
            arm.name,
            _GREY[arm.name] if arm.name in _GREY else Look(next(colours)),
            proof.block_steps,
            proof.par_B(arm).tolist(),
        )
        for arm in proof.arms
    ]
    end = proof.replay.first + proof.replay.steps
    return lines_over_steps("Peak-to-average ratio by block", "step", lines, end)
