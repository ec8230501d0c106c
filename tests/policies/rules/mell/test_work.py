"""What one call of `rebalance` can take back."""

from policies.plan import Reason
from policies.rules.mell import mell
from policies.rules.mell.allocate import settle_in
from policies.rules.mell.board import Board
from policies.rules.mell.units import single
from policies.rules.mell.work import Work
from tests.policies.rules.mell.clusters import cluster, named, shown
from tests.policies.rules.mell.test_board import WEIGHTS, answers, board


def test_what_is_taken_back_leaves_no_trace() -> None:
    made = cluster("A: L.55 T.2 T.13 | B: m.4 S.3 | C: T.2", "x.35")
    before = shown(made)
    work = Work(Board(made, WEIGHTS, clears=True), mell().reading)
    replica = next(iter(made.replicas.values()))
    mark = work.mark()
    work.lift(single(named(made, "m")), Reason.FILL)
    assert settle_in(work, single(named(made, "x")), replica)
    assert list(answers(work.board)) == list(answers(board(made)))
    work.undo(mark)
    assert shown(made) == before
    assert list(answers(work.board)) == list(answers(board(made)))
    assert made.settle().moves == ()
