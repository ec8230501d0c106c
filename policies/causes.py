"""Causes of migrations that end without effect or fall back from KV to tokens, as values for code and for people.

A cause is set where the error is raised, travels with the error and ends in the migration's record. The texts beside
it are for people alone.
"""

from enum import StrEnum


class Cause(StrEnum):
    """The cause of a deviation from the ordered migration.

    The causes of the first block lie in the request, those of the second are refusals, those of the third failures
    between the two replicas. A cause of the fourth block only turns a KV migration into one by tokens, as every cause
    of the third does before the hand-over.
    """

    REQUEST_ENDED = "request_ended"
    CLIENT_GONE = "client_gone"
    PREFILL_TIMEOUT = "prefill_timeout"
    """The request's replica took too long to compute its prompt."""

    ALREADY_MOVING = "already_moving"
    ALREADY_THERE = "already_there"
    IMMOVABLE = "immovable"
    TOO_LONG = "too_long"
    NO_ROOM = "no_room"
    STOPPING = "stopping"
    ASLEEP = "asleep"
    """The replica has dropped its model's parameters, or is about to."""
    FINGERPRINT = "fingerprint"
    """The replicas' models differ; or their KV caches, where tokens alone would do."""
    MIGRATION_GONE = "migration_gone"
    """The target no longer holds the migration: its lease ran out, or it was cancelled there."""
    SUPERSEDED = "superseded"
    """The order came from a scheduler that a newer one has replaced."""
    ADAPTER = "adapter"
    """The engine cannot load the LoRA adapter of the request."""
    GRAMMAR = "grammar"
    """The target's engine cannot compile the request's grammar, or not in time, or it does not accept the output."""
    NOT_EMPTY = "not_empty"
    NOT_RUNNING = "not_running"
    NOT_BEGUN = "not_begun"
    """The order did not reach its source, or raised an exception there that is no MigrationError."""

    PEER_LOST = "peer_lost"
    NO_ANSWER = "no_answer"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    UNEXPECTED = "unexpected"
    """An exception that is no MigrationError: the logs have its traceback."""

    BLOCKS_GONE = "blocks_gone"
    NO_SLOT = "no_slot"


PAIR_FAILURES = frozenset(
    {Cause.PEER_LOST, Cause.NO_ANSWER, Cause.TRANSFER_FAILED, Cause.TRANSFER_TIMEOUT, Cause.UNEXPECTED}
)
"""Failures of source and target as a pair, independent of the request and of the room at the target."""
