"""Which GEMMs to keep high for the least harm, where effective bits are limited.

This is a knapsack problem: each name costs bits and removes harm. Roundings of different products
are independent, so the powers of their errors add, and the harm that a name removes is its harm
alone, squared. Names are added by harm removed per bit (Dantzig, "Discrete-Variable Extremum
Problems", 1957), those that no longer fit are passed over, and each set on the way is measured.

If powers do add, the best of these sets and of the single names removes at least half of what the
best possible set removes. Single names are measured by a search in any case. The measured harm
decides, so a wrong guess of the order costs bits, and is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mprun.numerics.op_search import SetMeasure, SmallestSet
from mprun.records.search_ops_record import SearchStep


def least_harm(
    alone: Mapping[str, float], harm: SetMeasure, bits: SetMeasure, budget: float
) -> SmallestSet:
    """The set to keep high with the least harm that was found within a budget.

    Args:
        alone: name to its harm alone, not NaN.
        harm: measures the harm with a set high; not NaN.
        bits: effective bits with a set high.
        budget: at most so many effective bits.

    Raises:
        ValueError: even with nothing high there are more.
    """
    lowest = bits(())
    if lowest > budget:
        raise ValueError(f"a budget of {budget:g} effective bits is below {lowest:.4g}")

    def removed_per_bit(name: str) -> float:
        cost = bits((name,)) - lowest
        return alone[name] ** 2 / cost if cost > 0 else math.inf

    kept: tuple[str, ...] = ()
    tried, steps = [kept], list[SearchStep]()
    for name in sorted(alone, key=lambda n: -removed_per_bit(n)):
        if bits((*kept, name)) > budget:
            continue
        kept = (*kept, name)
        tried.append(kept)
        steps.append(SearchStep("add", name, harm(kept)))
    tried += [(name,) for name in alone if bits((name,)) <= budget]
    best = min(tried, key=harm)  # of equal ones the first, which has the fewest bits
    return SmallestSet(best, harm(best), tuple(steps))
