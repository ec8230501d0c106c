"""What makes a raw run stale."""

from benchmarks.evaluation.sources import START, bare, fingerprint, reached


def test_documentation_makes_nothing_stale() -> None:
    said = 'def f(x):\n    """Say it."""\n    return x + 1\n'
    assert bare(said) == bare("def f(x):\n    # In other words.\n    return x+1\n")


def test_code_does() -> None:
    assert bare("x = 1") != bare("x = 2")
    assert bare("x = 'a'") != bare("x = 'b'")


def test_the_simulated_world_is_reached() -> None:
    assert {"app.simulator.world", "policies.decision.epoch", "policies.cluster.cluster", "migration.paths"} <= reached(
        START
    )


def test_policies_do_not_make_each_other_stale() -> None:
    own = {"policies.rules.pack.policy", "policies.rules.mell.policy", "policies.rules.best_fit"}
    assert not own & reached(START)
    assert own & (reached(START) | reached("policies.rules.pack.policy")) == {"policies.rules.pack.policy"}


def test_options_do_not_change_the_code() -> None:
    assert fingerprint("pack:headroom_s=4") == fingerprint("pack") != fingerprint("best_fit")
