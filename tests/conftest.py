"""Unit tests run without a cluster: whatever would start one fails. No test fails because the machine is slow."""

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "unhurried", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def no_cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ray.init` raise outside of integration tests."""
    if not request.node.get_closest_marker("integration"):
        import ray

        def refuse(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a unit test must not start Ray")

        monkeypatch.setattr(ray, "init", refuse)
