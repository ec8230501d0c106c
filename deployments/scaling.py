"""How many engine replicas Serve keeps: as many as it was last told to, within the configured bounds.

Serve's own policy counts requests in flight; here an ingress holds one stream per replica however many
requests there are, so that number says nothing.
"""

from typing import Any


class KeepTarget:
    """An autoscaling policy for Serve's controller, called about ten times a second: never blocks or raises."""

    def __init__(self, **kwargs: Any) -> None:
        """Serve passes the policy's configuration; there is none."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The current target; Serve applies min_replicas and max_replicas to it."""
        return context.target_num_replicas, {}
