"""The lead of decisions, measured from moves."""

from policies.decision.experience import REMEMBERED, Lead


def test_before_any_move_the_lead_is_two_epochs() -> None:
    assert Lead(2.0).seconds == 4.0


def test_nine_of_ten_moves_are_within_the_lead() -> None:
    lead = Lead(1.0)
    for took in (5, 1, 2, 3, 4, 6, 7, 8, 9, 100):
        lead.observe(took)
    assert lead.seconds == 2.0 + 9


def test_old_moves_are_forgotten() -> None:
    lead = Lead(1.0)
    for took in [50.0] * REMEMBERED + [0.5] * REMEMBERED:
        lead.observe(took)
    assert lead.seconds == 2.5
