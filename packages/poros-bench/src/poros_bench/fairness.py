"""What must be equal before two cells may be set against each other."""

from __future__ import annotations

from poros.receipt import Receipt

EQUAL = ("data_hash", "trainable_parameters", "dtype_policy", "tokens_per_step")
"""Fields of receipts: the token rows, the number of trained parameters, the dtypes, the work of a step."""

PLACES = ("gpu_name", "cpu")
"""Of the provenance: where it ran."""


def differences(one: Receipt, other: Receipt) -> list[str]:
    """What keeps two cells from being compared; empty if nothing does."""
    found = [name for name in EQUAL if getattr(one, name) is None or getattr(one, name) != getattr(other, name)]
    found += [name for name in PLACES if getattr(one.provenance, name) != getattr(other.provenance, name)]
    attention = [receipt.config.get("case", {}).get("attention") for receipt in (one, other)]
    return found + ([] if attention[0] == attention[1] else ["attention"])


def ratio(one: Receipt, other: Receipt) -> float | None:
    """Seconds per step of one over those of the other; None where that would not be fair, or wasn't measured."""
    if one.s_step_median is None or not other.s_step_median or differences(one, other):
        return None
    return one.s_step_median / other.s_step_median


def beyond_spread(one: Receipt, other: Receipt) -> bool:
    """Whether two cells' seconds differ by more than twice what their passes do among themselves."""
    if one.s_step_median is None or other.s_step_median is None:
        return False
    spread = max(one.s_step_std or 0.0, other.s_step_std or 0.0)
    return abs(one.s_step_median - other.s_step_median) > 2 * spread
