"""What is shown, and what is chance, where many cells are compared at once."""

from __future__ import annotations

from scipy import stats

CONFIDENCE = 0.95
"""With which nothing is called slower by chance: in all cells of a run together."""


def errors_allowed(replicates: int, comparisons: int) -> float:
    """Standard errors over so many replicates that a mean is above 0 by chance in one of so many comparisons.

    Student's quantile at Bonferroni's share of what ``CONFIDENCE`` leaves.
    """
    share = (1.0 - CONFIDENCE) / max(comparisons, 1)
    return float(stats.t.ppf(1.0 - share, max(replicates - 1, 1)))
