"""Input that cannot be simulated or replayed: the one error that its user can correct."""

import math


class BadInput(Exception):
    """Input that cannot be used; the message is one sentence with the reason."""


def require_positive(what: str, value: float) -> None:
    """Raises BadInput for zero, negative numbers, infinity and NaN."""
    if not 0 < value < math.inf:
        raise BadInput(f"The {what} must be a number greater than 0, got {value:g}.")


def require_not_negative(what: str, value: float) -> None:
    """Raises BadInput for negative numbers, infinity and NaN."""
    if not 0 <= value < math.inf:
        raise BadInput(f"The {what} must be 0 or more, got {value:g}.")
