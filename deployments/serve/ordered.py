"""Values that an operator has ordered in the place of configured ones, in Ray's internal key-value store.

An order outlives the scheduler, and counts for the value that was configured when it was given.
"""

import json
from typing import TypeVar

from pydantic import TypeAdapter

from migration import ray_store

Value = TypeVar("Value")


def read_ordered(key: str, configured: Value, adapter: TypeAdapter[Value]) -> Value:
    """The value that counts where this one is configured. Blocks for a round trip to Ray's control service."""
    found = json.loads(ray_store.read(key) or b"{}")
    if found.get("configured") != adapter.dump_python(configured, mode="json"):
        return configured
    return adapter.validate_python(found["ordered"])


def write_ordered(key: str, configured: Value, ordered: Value, adapter: TypeAdapter[Value]) -> None:
    """Replace the order. Blocks for a round trip to Ray's control service."""
    values = {"configured": configured, "ordered": ordered}
    dumped = {name: adapter.dump_python(value, mode="json") for name, value in values.items()}
    ray_store.write(key, json.dumps(dumped).encode())
