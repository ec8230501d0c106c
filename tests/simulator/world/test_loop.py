"""Virtual time: order, ties, cancelling."""

from simulator.world.loop import Loop, Turn


def test_things_happen_by_time_then_turn_then_in_the_order_of_asking() -> None:
    loop, seen = Loop(), list[str]()
    loop.at(2.0, Turn.ENGINE, lambda: seen.append("later"))
    loop.at(1.0, Turn.ARRIVAL, lambda: seen.append("arrival"))
    loop.at(1.0, Turn.EPOCH, lambda: seen.append("epoch"))
    loop.at(1.0, Turn.ENGINE, lambda: seen.append("first asked"))
    loop.at(1.0, Turn.ENGINE, lambda: seen.append("second asked"))
    loop.run(5.0)
    assert seen == ["first asked", "second asked", "epoch", "arrival", "later"]


def test_a_cancelled_action_does_not_happen() -> None:
    loop, seen = Loop(), list[str]()
    timer = loop.at(1.0, Turn.ENGINE, lambda: seen.append("cancelled"))
    timer.cancel()
    loop.run(5.0)
    assert seen == []


def test_actions_after_the_end_do_not_run() -> None:
    loop, seen = Loop(), list[float]()
    for time in (1.0, 2.0, 2.5):
        loop.at(time, Turn.ENGINE, lambda: seen.append(loop.now))
    loop.run(2.0)
    assert seen == [1.0, 2.0]


def test_an_action_for_the_past_happens_now() -> None:
    loop, seen = Loop(), list[float]()

    def ask_for_the_past() -> None:
        loop.at(1.0, Turn.ENGINE, lambda: seen.append(loop.now))

    loop.at(3.0, Turn.ENGINE, ask_for_the_past)
    loop.run(5.0)
    assert seen == [3.0]


def test_times_that_are_equal_but_for_rounding_errors_are_equal() -> None:
    loop, seen = Loop(), list[str]()
    loop.at(0.3, Turn.EPOCH, lambda: seen.append("epoch"))
    loop.at(0.1 + 0.2, Turn.ENGINE, lambda: seen.append("engine"))
    loop.run(1.0)
    assert seen == ["engine", "epoch"]
