"""The one error of a replay that its user can mend."""


class BadInput(Exception):
    """What was given cannot be replayed; the text is one sentence that says why."""
