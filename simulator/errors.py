"""The simulator's one error: input that its user has to correct. The exit status that its commands have for it."""

import math
import sys
from collections.abc import Callable

BAD_INPUT, INTERRUPTED = 2, 130


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


def status_of(command: Callable[[], int]) -> int:
    """The status that a command returns; after bad input or an interrupt, a message and the status of that."""
    try:
        return command()
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("Interrupted: nothing is reported.", file=sys.stderr)
        return INTERRUPTED
