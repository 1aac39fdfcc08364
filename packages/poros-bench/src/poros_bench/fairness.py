"""What must be equal before two cells may be set against each other."""

from __future__ import annotations

from poros.receipt import Receipt

EQUAL = ("data_hash", "trainable_parameters", "dtype_policy", "tokens_per_step")
"""Fields of receipts: the token rows, the number of trained parameters, the dtypes, the work of a step."""

PLACES = ("gpu_name", "cpu", "torch", "transformers", "peft", "bitsandbytes")
"""Of the provenance: on what it ran."""


def differences(one: Receipt, other: Receipt) -> list[str]:
    """What keeps two cells from being compared; empty if nothing does."""
    found = [name for name in EQUAL if getattr(one, name) is None or getattr(one, name) != getattr(other, name)]
    found += [name for name in PLACES if getattr(one.provenance, name) != getattr(other.provenance, name)]
    settings = [{**receipt.config.get("case", {}), "name": None, "block_size": None} for receipt in (one, other)]
    found += [name for name in settings[0] if settings[0][name] != settings[1].get(name) and name not in _REPETITIONS]
    return found


_REPETITIONS = ("steps", "passes", "warm_up")
"""Settings of a case that say how often something is measured, and not what."""


def ratio(one: Receipt, other: Receipt) -> float | None:
    """Seconds per step of one over those of the other; None where that would not be fair, or wasn't measured."""
    if one.s_step_median is None or not other.s_step_median or differences(one, other):
        return None
    return one.s_step_median / other.s_step_median


def beyond_spread(one: Receipt, other: Receipt) -> bool | None:
    """Whether two cells' seconds differ by more than twice what their passes do; None where there is one pass only."""
    if one.s_step_median is None or other.s_step_median is None or one.s_step_std is None or other.s_step_std is None:
        return None
    return abs(one.s_step_median - other.s_step_median) > 2 * max(one.s_step_std, other.s_step_std)
