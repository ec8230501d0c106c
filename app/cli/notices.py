"""The notices of clouds that a spot machine ends, read from the answers of their metadata services; pure.

Times are in seconds since 1970. A notice counts even where its time cannot be read. Bodies of another form raise
ValueError.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

GCE_S = 30.0
"""The time from a notice of GCE to the end; the notice has none itself."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine ends at `ends_at`; None: the time is not known."""

    ends_at: float | None

    def left_s(self, now: float) -> float | None:
        """The seconds that are left, at least 0 and at most a day."""
        return None if self.ends_at is None else round(min(max(self.ends_at - now, 0.0), 86_400.0), 1)


def parse_ec2(text: str) -> Notice:
    """`spot/instance-action` of EC2: whatever the action, the instance no longer computes."""
    return Notice(_iso_time(_mapping(text).get("time")))


def parse_gce(text: str, now: float) -> Notice | None:
    """`instance/preempted` of GCE."""
    match text.strip():
        case "TRUE":
            return Notice(now + GCE_S)
        case "FALSE":
            return None
    raise ValueError(f"{text[:40]!r} is neither TRUE nor FALSE")


def parse_azure(text: str, machine: str) -> Notice | None:
    """The scheduled events of Azure, which has those of other machines of a scale set among them."""
    events = _mapping(text).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("there is no list of Events")
    for event in events:
        if event.get("EventType") == "Preempt" and machine in event.get("Resources", ()):
            return Notice(_http_time(event.get("NotBefore")))
    return None


def parse_file(text: str) -> Notice:
    """A file that appears; its content is the time of the end, or nothing."""
    return Notice(_iso_time(text.strip()))


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _iso_time(text: object) -> float | None:
    """A time like 2026-11-28T12:00:00Z; without a zone, it is UTC."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _http_time(text: object) -> float | None:
    """A time like Sat, 28 Nov 2026 12:00:00 GMT; Azure leaves it empty once the event has begun."""
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except ValueError:
        return None
