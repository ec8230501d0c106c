"""What ends a command early, and the exit status that says so.

    CliError
    ├── Failed        1: the endpoint refused, or what was waited for did not come about
    └── NotThere      3: nobody answers at the URL, or somebody who is not Mell

Wrong usage is 2, as with any command line.
"""

from typing import Any


class CliError(Exception):
    """A message for the operator; `body` is the document of an error that the server sent."""

    status = 1

    def __init__(self, message: str, body: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.body = body if body is not None else {"error": {"message": message}}


class Failed(CliError):
    """It was refused, or ended otherwise than was wanted."""


class NotThere(CliError):
    """There is no Mell at the URL."""

    status = 3
