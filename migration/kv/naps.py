"""How the processes of an engine on CPUs wait for each other.

vLLM's engine core and workers pass messages through shared memory. For a second after each message, the reader looks
for the next one again and again, and only yields its core in between. On a GPU's node that is the shortest way, and
cores are many. On CPUs the cores are those that compute: the engine core looks for as long as its workers compute, and
so takes the time of the frontend, of Mell's processes and of other engines.

A reader that sleeps between two looks gets a message 0.1 ms later. vLLM's own way to sleep, which comes after the
second, is not for this: a writer drops signals that follow each other within a millisecond, and the reader then sleeps
for seconds.
"""

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

LOOKING_S = 100e-6
"""The time for which a reader looks again at once: some answers come as soon as that."""

NAP_S = 50e-6
"""The time between two looks after that; Linux makes it some 0.1 ms."""

_wait = SpinCondition.wait


def nap_between_looks() -> None:
    """Have all readers in this process sleep between two looks."""
    SpinCondition.wait = _wait_with_naps


def _wait_with_naps(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """Wait until the next look."""
    now = time.monotonic()
    read, began = getattr(condition, "mell_waiting", (0.0, 0.0))
    if read != condition.last_read:  # The first wait for the next message.
        began = now
        condition.mell_waiting = (condition.last_read, now)
    if began + LOOKING_S < now < condition.last_read + condition.busy_loop_s:
        time.sleep(NAP_S)
    else:
        _wait(condition, timeout_ms)
