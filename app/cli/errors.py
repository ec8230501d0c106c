"""Errors that end a command, with their exit status.

    CliError
    ├── Failed        1: the endpoint refused, or a wait ended without success
    └── NotThere      3: no answer at the URL, or not from Mell

Wrong usage is status 2, by convention.
"""

from typing import Any


class CliError(Exception):
    """A message for the operator; `body` is the error document for --json, the server's if it sent one."""

    status = 1

    def __init__(self, message: str, body: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.body = body if body is not None else {"error": {"message": message}}


class Failed(CliError):
    """The order was refused or did not succeed."""


class NotThere(CliError):
    """No Mell answers at the URL."""

    status = 3
