"""Why migrations end without effect, or go by tokens where KV was to be sent: values, for code and for people.

A cause is fixed where the error is raised, travels with the error and ends in the migration's record. Texts beside it
are for people alone.
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why a migration did not go as it was ordered.

    The first block is the request's own, the second a refusal, the third a failure between the two replicas. The fourth
    only makes a KV migration one by tokens, as every cause of the third does before the hand-over.
    """

    REQUEST_ENDED = "request_ended"
    CLIENT_GONE = "client_gone"

    ALREADY_MOVING = "already_moving"
    ALREADY_THERE = "already_there"
    IMMOVABLE = "immovable"
    TOO_LONG = "too_long"
    NO_ROOM = "no_room"
    STOPPING = "stopping"
    FINGERPRINT = "fingerprint"
    """The replicas' models differ; or their KV caches, where tokens alone would do."""
    MIGRATION_GONE = "migration_gone"
    """The target no longer holds the migration: its lease ran out, or it was cancelled there."""
    SUPERSEDED = "superseded"
    """A newer scheduler is at work than the one that asked."""
    NOT_EMPTY = "not_empty"
    NOT_RUNNING = "not_running"

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
"""Causes that say something of source and target as a pair, and nothing of the request or of the room at the target."""
