"""A dictionary that forgets."""

from migration.protocol.record import Recent


def test_what_came_first_is_forgotten_first() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert dict(recent) == {"b": 2, "c": 4}
