"""The sessions under way from a replica: which of them end as their targets leave."""

from dataclasses import dataclass

from deployments.replica.outgoing import Outgoing
from policies.model import ReplicaId


@dataclass
class Session:
    target: ReplicaId
    lost: bool = False

    def target_lost(self) -> None:
        self.lost = True


def sessions(*targets: str) -> Outgoing[int, Session]:
    return Outgoing(enumerate(map(Session, map(ReplicaId, targets))))


def test_sessions_end_whose_targets_are_not_running() -> None:
    outgoing = sessions(*"bcbd")
    outgoing.follow([ReplicaId("a"), ReplicaId("c")])
    assert [outgoing[number].lost for number in range(4)] == [True, False, True, True]


def test_session_is_kept_until_it_has_ended() -> None:
    outgoing = sessions("b")
    outgoing.follow(())
    assert len(outgoing) == 1 and outgoing[0].lost


def test_nothing_ends_while_all_targets_run() -> None:
    outgoing = sessions(*"bc")
    outgoing.follow(list(map(ReplicaId, "abc")))
    assert not any(session.lost for session in outgoing.values())
