"""The number of examples that hypothesis tries. A busy machine is no failure."""

from hypothesis import HealthCheck, settings

from tests.counts import scaled

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
"""A moderate number of examples, each of which may take its time."""

few = settings(unhurried, max_examples=15)
"""For tests that run once for every policy."""

many = settings(unhurried, max_examples=scaled(1000))
"""For tests that are marked slow, and run once for every policy and variant."""
