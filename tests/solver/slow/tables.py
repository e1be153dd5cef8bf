"""Slow twins of tables: the fixed rule, and shares assigned to the coolest ranks."""

from __future__ import annotations

import numpy as np

from tests.solver.slow.heat import mean_of_max, rank_risks, rank_series, risk_of

MIN_GAIN = 1e-5


def holders_of(phy2log_RS, expert):
    """Return the physical ids of an expert's replicas."""
    return np.flatnonzero(phy2log_RS.ravel() == expert)


def fixed_rule(phy2log_RS, sources, experts, width=1):
    """Return the fixed rule's tables. Each group of ``width`` sources is one dealing table."""
    table_GE = np.zeros((sources, experts), dtype=int)
    for e in range(experts):
        holders = holders_of(phy2log_RS, e)
        table_GE[:, e] = [holders[(g // width + g % width) % len(holders)] for g in range(sources)]
    return table_GE


def slot_shares(phy2log_RS, table_GE, share_GE):
    share_P = np.zeros(phy2log_RS.size)
    for g, table_E in enumerate(table_GE):
        for e, slot in enumerate(table_E):
            share_P[slot] += share_GE[g, e]
    return share_P.reshape(phy2log_RS.shape)


def tables_par(phy2log_RS, table_GE, scaled_EN, share_N, share_GE):
    return mean_of_max(scaled_EN, share_N, phy2log_RS, slot_shares(phy2log_RS, table_GE, share_GE))


def largest_first(share_G):
    return sorted(range(len(share_G)), key=lambda g: (-share_G[g], g))


def spread(phy2log_RS, order_E, scaled_EN, share_N, share_GE, z):
    """Assign each expert's shares, largest first, to the coolest rank. Shares without tokens follow the fixed rule."""
    sources, experts = share_GE.shape
    slots = phy2log_RS.shape[1]
    table_GE = fixed_rule(phy2log_RS, sources, experts)
    margin = np.inf
    share_P = np.zeros(phy2log_RS.size)
    for e in range(experts):
        holders = holders_of(phy2log_RS, e)
        share_P[holders] = 1.0 if len(holders) == 1 else 0.0
    for e in order_E:
        holders = holders_of(phy2log_RS, e)
        if len(holders) == 1:
            continue
        series_RN = rank_series(phy2log_RS, share_P.reshape(phy2log_RS.shape), scaled_EN)
        added = dict.fromkeys(holders, 0.0)
        for g in largest_first(share_GE[:, e]):
            share = float(share_GE[g, e])
            if share <= 0:
                continue
            risks = [
                risk_of(series_RN[slot // slots] + (added[slot] + share) * scaled_EN[e], share_N, z)
                for slot in holders
            ]
            table_GE[g, e] = holders[int(np.argmin(risks))]
            margin = min(margin, _gap(risks))
            added[table_GE[g, e]] += share
        for slot in holders:
            share_P[slot] = added[slot]
    return table_GE, margin


def cool(phy2log_RS, table_GE, scaled_EN, share_N, share_GE, z):
    """Make the best move of a share off the hottest rank, as long as it lowers the higher of the two ranks' risks."""
    slots = phy2log_RS.shape[1]
    table_GE = table_GE.copy()
    margin = np.inf
    for _ in range(4 * phy2log_RS.size):
        risk_R = rank_risks(phy2log_RS, slot_shares(phy2log_RS, table_GE, share_GE), scaled_EN, share_N, z)
        hot = int(risk_R.argmax())
        bound = risk_R[hot] - MIN_GAIN
        after = {}
        for (g, e), slot in np.ndenumerate(table_GE):
            if slot // slots != hot or share_GE[g, e] <= 0:
                continue
            for target in holders_of(phy2log_RS, e):
                if target != slot:
                    trial_GE = table_GE.copy()
                    trial_GE[g, e] = target
                    risks = rank_risks(
                        phy2log_RS, slot_shares(phy2log_RS, trial_GE, share_GE), scaled_EN, share_N, z
                    )
                    after[g, e, target] = max(risks[hot], risks[target // slots])
        margin = min(margin, _gap(-risk_R), _gap([*after.values(), bound]))
        if min(after.values(), default=np.inf) >= bound:
            break
        g, e, target = min(after, key=after.get)
        table_GE[g, e] = target
    return table_GE, margin


def _gap(values):
    """Return the gap between the two smallest values."""
    first, *rest = sorted(values)
    return rest[0] - first if rest else np.inf
