"""Fingerprints, which make raw runs stale."""

from benchmarks.evaluation.runs.sources import START, bare, fingerprint, reached


def test_documentation_does_not_change_the_syntax_tree() -> None:
    said = 'def f(x):\n    """Return it."""\n    return x + 1\n'
    assert bare(said) == bare("def f(x):\n    # In other words.\n    return x+1\n")


def test_code_changes_the_syntax_tree() -> None:
    assert bare("x = 1") != bare("x = 2")
    assert bare("x = 'a'") != bare("x = 'b'")


def test_simulator_modules_are_reached() -> None:
    assert {
        "simulator.world.world",
        "policies.decision.deciding",
        "policies.cluster.cluster",
        "policies.paths.choice",
    } <= reached(START)


def test_fingerprint_excludes_other_policies() -> None:
    own = {"policies.rules.pack.policy", "policies.rules.mell.policy", "policies.rules.best_fit"}
    assert not own & reached(START)
    assert own & (reached(START) | reached("policies.rules.pack.policy")) == {"policies.rules.pack.policy"}


def test_options_do_not_change_the_fingerprint() -> None:
    assert fingerprint("pack:headroom_s=4") == fingerprint("pack") != fingerprint("best_fit")
