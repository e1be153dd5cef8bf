"""Steps of the local search: pressures of all ranks, and every legal swap and exchange, each judged from scratch."""

from __future__ import annotations

import numpy as np

from tests.solver.slow.heat import even_shares, rank_risks


def scale_of(risk_R):
    """Base and span of the pressures at these risks."""
    mean, peak = risk_R.mean(), risk_R.max()
    base = mean - 12 * (peak - mean)
    return base, max(peak - base, 1e-6)


def pressure_of(risk_R, base, span):
    return (np.maximum((risk_R - base) / span, 0) ** 8).sum()


def smooth_peak(risk_R):
    base, span = scale_of(risk_R)
    return base + span * pressure_of(risk_R, base, span) ** (1 / 8)


def slots_away(phy2log_RS, home_ER):
    return sum(not home_ER[expert, r] for r, row in enumerate(phy2log_RS) for expert in row)


def legal_swaps(phy2log_RS, hot):
    """Every swap of ``hot`` with another rank that puts no expert twice on a rank: slot, other rank, its slot."""
    for slot, out in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if rank == hot or out in row:
                continue
            for other, come in enumerate(row):
                if come not in phy2log_RS[hot]:
                    yield slot, rank, other


def legal_exchanges(phy2log_RS, hot):
    """Every spare replica that may become one of an expert of ``hot``: slot, other rank, its slot."""
    for slot, gainer in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if gainer in row:
                continue
            for other, loser in enumerate(row):
                if (phy2log_RS == loser).sum() > 1:
                    yield slot, rank, other


def swapped(phy2log_RS, share_RS, hot, step):
    """Placement and shares after a swap, shares going along."""
    slot, rank, other = step
    phy2log_RS, share_RS = phy2log_RS.copy(), share_RS.copy()
    for array in (phy2log_RS, share_RS):
        array[hot, slot], array[rank, other] = array[rank, other], array[hot, slot]
    return phy2log_RS, share_RS


def exchanged(phy2log_RS, hot, step):
    """Placement and shares after an exchange, both experts split evenly afresh."""
    slot, rank, other = step
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[rank, other] = phy2log_RS[hot, slot]
    return phy2log_RS, even_shares(phy2log_RS)


def gains(placed, scaled_EN, share_N, z, steps):
    """Pressure that each step takes away; ``steps`` maps a step to the placement and shares after it."""
    risk_R = rank_risks(*placed, scaled_EN, share_N, z)
    base, span = scale_of(risk_R)
    before = pressure_of(risk_R, base, span)
    return {
        step: before - pressure_of(rank_risks(*after, scaled_EN, share_N, z), base, span)
        for step, after in steps.items()
    }


def swap_gains(phy2log_RS, share_RS, hot, scaled_EN, share_N, z):
    steps = {step: swapped(phy2log_RS, share_RS, hot, step) for step in legal_swaps(phy2log_RS, hot)}
    return gains((phy2log_RS, share_RS), scaled_EN, share_N, z, steps)


def exchange_gains(phy2log_RS, hot, scaled_EN, share_N, z, relief_over=-np.inf):
    """Of the exchanges whose gainer alone, with one more replica that burdens nobody, takes more than so much away."""
    share_RS = even_shares(phy2log_RS)
    thinner = {}
    for slot, gainer in enumerate(phy2log_RS[hot]):
        replicas = (phy2log_RS == gainer).sum()
        thinner[slot] = phy2log_RS, np.where(phy2log_RS == gainer, 1 / (replicas + 1), share_RS)
    relief = gains((phy2log_RS, share_RS), scaled_EN, share_N, z, thinner)
    steps = {
        step: exchanged(phy2log_RS, hot, step)
        for step in legal_exchanges(phy2log_RS, hot)
        if relief[step[0]] > relief_over
    }
    return gains((phy2log_RS, share_RS), scaled_EN, share_N, z, steps)
