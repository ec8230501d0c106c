"""The one error of a simulation that its user can mend."""

import math


class BadInput(Exception):
    """What was given cannot be simulated; the text is one sentence that says why."""


def require_positive(what: str, value: float) -> None:
    """Refuse zero, negative numbers, infinity and NaN."""
    if not 0 < value < math.inf:
        raise BadInput(f"The {what} must be a number greater than 0, got {value:g}.")


def require_not_negative(what: str, value: float) -> None:
    """Refuse negative numbers, infinity and NaN."""
    if not 0 <= value < math.inf:
        raise BadInput(f"The {what} must be 0 or more, got {value:g}.")
