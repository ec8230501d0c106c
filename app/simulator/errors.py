"""The simulator's one error: input that its user has to correct."""

import math


class BadInput(Exception):
    """Input that cannot be used; the message is one sentence with the reason."""


def require_positive(name: str, value: float) -> None:
    """Raise BadInput for zero, negative numbers, infinity and NaN."""
    if not 0 < value < math.inf:
        raise BadInput(f"The {name} must be a number greater than 0, got {value:g}.")


def require_not_negative(name: str, value: float) -> None:
    """Raise BadInput for negative numbers, infinity and NaN."""
    if not 0 <= value < math.inf:
        raise BadInput(f"The {name} must be 0 or more, got {value:g}.")
