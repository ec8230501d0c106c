"""Both halves of a pair, walked through all joint states with deaths, silence, lost answers and late proposals."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from migration.memory.pair_tables import AT_HOME, TABLE, TOGETHER, HalfState, PairAction, PairEvent, new_half
from migration.protocol.errors import IllegalEvent

S, E = HalfState, PairEvent
GIVES = 2
"""The layers that each half gives: two are enough for a layer before and a layer behind."""


@dataclass(frozen=True)
class Half:
    """One half. `given` layers are remote; `serves` while the buddy's worker may have its layers run here.

    `lost`: its connection has ended. `wrong`: a step could use a layer that nobody holds.
    """

    state: HalfState | None = None
    given: int = 0
    alive: bool = True
    serves: bool = False
    lost: bool = False

    @property
    def needs_buddy(self) -> bool:
        """True if its steps yield tokens by way of the buddy."""
        return self.alive and self.given > 0 and not self.lost and self.state is not S.OVER


@dataclass(frozen=True)
class Joint:
    """Both halves, and the proposal while it is on its way. The lower half leads."""

    a: Half = Half(S.ASKING, serves=True)
    b: Half = Half()
    asked: bool = True

    def of(self, name: str) -> Half:
        return self.a if name == "a" else self.b

    def put(self, name: str, half: Half) -> "Joint":
        return replace(self, a=half) if name == "a" else replace(self, b=half)


def fed(joint: Joint, name: str, event: PairEvent) -> Joint:
    """The joint state after one half took an event, and did what the table says."""
    half = joint.of(name)
    assert half.state is not None
    following, actions = TABLE[half.state][event]
    half = replace(half, state=following)
    if event is E.BUDDY_LOST and half.given:
        half = replace(half, lost=True)
    if PairAction.RESTORE in actions:
        # Connections end, and the buddy's KV is freed, before anything else.
        half = replace(half, serves=False, lost=True)
    if event is E.RESTORED:
        half = replace(half, given=0, lost=False)
    if PairAction.CLOSE in actions:
        assert not half.given, "a half that closes has all layers"
        half = replace(half, serves=False)
    if PairAction.GIVE_UP in actions:
        half = replace(half, alive=False, serves=False)
    return ends_connections(joint.put(name, half))


def ends_connections(joint: Joint) -> Joint:
    """A half that serves nobody any more has closed the connections to it: the other one loses its hops."""
    for name, other in ("ab", "ba"):
        if not joint.of(other).serves and joint.of(name).given:
            joint = joint.put(name, replace(joint.of(name), lost=True))
    return joint


def activities(joint: Joint, name: str) -> Iterator[Joint]:
    """The results that the activity of a half may have."""
    half, buddy = joint.of(name), joint.of("b" if name == "a" else "a")
    match half.state:
        case S.ASKING:
            if buddy.state is not None:
                yield fed(joint, name, E.ACCEPTED)
            else:
                yield fed(joint, name, E.REFUSED)
            # The answer, or the question, is lost or late.
            yield fed(joint, name, E.UNDO)
        case S.LINKING:
            if buddy.alive and buddy.serves:
                yield fed(joint, name, E.LINKED)
            yield fed(joint, name, E.LINK_FAILED)
        case S.HOME if not buddy.alive:
            yield fed(joint, name, E.BUDDY_LOST)
        case S.HOME if buddy.state is None or buddy.state in AT_HOME:
            yield fed(joint, name, E.BUDDY_HOME)
        case S.GIVING | S.RETURNING:
            yield from exchanges(joint, name, half.state is S.GIVING)
        case state if state in RESULTS:
            for event in RESULTS[state]:
                yield fed(joint, name, event)


RESULTS = {
    S.FITTING: (E.FITS,),
    S.SHRINKING: (E.FITS,),
    S.LOADING: (E.LOADED, E.LOAD_FAILED),
    S.RESTORING: (E.RESTORED, E.RESTORE_FAILED),
}


def exchanges(joint: Joint, name: str, gives: bool) -> Iterator[Joint]:
    """The results of a layer on its way."""
    half, buddy = joint.of(name), joint.of("b" if name == "a" else "a")
    if half.given == (GIVES if gives else 0):
        yield fed(joint, name, E.ALL_GIVEN if gives else E.ALL_RETURNED)
        return
    if buddy.alive and buddy.serves and not half.lost:
        moved = replace(half, given=half.given + (1 if gives else -1))
        yield fed(joint.put(name, moved), name, E.GIVEN if gives else E.RETURNED)
    yield fed(joint, name, E.BUDDY_LOST)


def world(joint: Joint) -> Iterator[Joint]:
    """What may happen from outside."""
    if joint.asked:
        yield replace(joint, asked=False)
        if joint.b.alive and joint.b.state is None:
            assert new_half(leads=False).state is S.LINKING
            yield replace(joint, asked=False).put("b", replace(joint.b, state=S.LINKING, serves=True))
    for name, other in ("ab", "ba"):
        half, buddy = joint.of(name), joint.of(other)
        if not half.alive or half.state is None or half.state is S.OVER:
            continue
        yield ends_connections(joint.put(name, replace(half, alive=False, serves=False)))
        yield fed(joint, name, E.UNDO)
        yield fed(joint, name, E.CALL_FAILED)
        if half.state in TOGETHER and buddy.alive and buddy.state not in TOGETHER:
            yield fed(joint, name, E.UNDO)
        if half.state not in (S.ASKING, S.RESTORING):
            # It is dead, or silent for too long.
            yield fed(joint, name, E.BUDDY_LOST)


def successors(joint: Joint) -> Iterator[Joint]:
    for name in "ab":
        if joint.of(name).alive and joint.of(name).state is not None:
            yield from activities(joint, name)
    yield from world(joint)


def walk() -> dict[Joint, set[Joint]]:
    start = Joint()
    found: dict[Joint, set[Joint]] = {}
    left = deque([start])
    while left:
        joint = left.popleft()
        if joint not in found:
            found[joint] = set(successors(joint))
            left.extend(found[joint])
    return found


def test_at_every_moment_some_half_holds_each_layer_or_no_token_comes_of_it() -> None:
    graph = walk()
    for joint in graph:
        for name, other in ("ab", "ba"):
            if joint.of(name).needs_buddy:
                assert joint.of(other).alive
                assert joint.of(other).serves, joint
            if joint.of(name).state is S.OVER and joint.of(name).alive:
                assert not joint.of(name).given, "a half that is over has all layers"
    assert len(graph) > 1000


def test_a_half_ends_its_promises_only_if_the_other_needs_nothing_or_was_taken_for_dead() -> None:
    for joint, following in walk().items():
        for after in following:
            for name, other in ("ab", "ba"):
                ends = after.of(name).alive and after.of(name).state is S.OVER and joint.of(name).state is not S.OVER
                if ends and joint.of(other).needs_buddy:
                    assert fed(joint, name, E.BUDDY_LOST) == after


def test_every_pair_can_end_with_two_whole_replicas_that_are_alive() -> None:
    graph = walk()
    ends = {joint for joint in graph if all(h.state in (None, S.OVER) or not h.alive for h in (joint.a, joint.b))}
    back: dict[Joint, set[Joint]] = {}
    for joint, following in graph.items():
        for after in following:
            back.setdefault(after, set()).add(joint)
    reached, left = set(ends), deque(ends)
    while left:
        for before in back.get(left.popleft(), ()):
            if before not in reached:
                reached.add(before)
                left.append(before)
    assert reached == set(graph)


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    half = new_half(leads=True)
    with pytest.raises(IllegalEvent):
        half.feed(E.GIVEN)
    assert half.state is S.ASKING
