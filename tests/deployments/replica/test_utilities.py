"""Operators' orders to the engine of one replica."""

from deployments.engine.port import ProfilerUnavailable, ProfileSession
from deployments.engine.tokens import pack
from deployments.replica.utilities import EngineUtilities
from migration.protocol.errors import TransferFailed
from policies.model import ReplicaId
from tests.deployments.engine.quick_engine import QuickEngine, blocks_of


class ProfiledEngine(QuickEngine):
    """An engine with a profiler."""

    profiled: ProfileSession | None = None

    async def start_profile(self, session: ProfileSession) -> None:
        if self.profiled is not None:
            raise ProfilerUnavailable("a session is under way")
        self.profiled = session

    async def stop_profile(self) -> None:
        if self.profiled is None:
            raise ProfilerUnavailable("no session is under way")
        self.profiled = None


def utilities() -> tuple[ProfiledEngine, EngineUtilities]:
    engine = ProfiledEngine()
    return engine, EngineUtilities(engine, ReplicaId("r1"))


async def test_the_prefix_cache_is_dropped_or_in_use() -> None:
    engine, orders = utilities()
    engine._batch.take_in([1, 2, 3, 4], 0, pack((1, 2, 3, 4)))
    assert blocks_of(engine)
    assert await orders.reset_prefix_cache() is None and not blocks_of(engine)

    async def refuse() -> None:
        raise TransferFailed("the prefix cache is in use")

    engine.reset_prefix_cache = refuse  # type: ignore[method-assign]
    assert await orders.reset_prefix_cache() == "the prefix cache is in use"


async def test_a_session_has_the_replicas_name() -> None:
    engine, orders = utilities()
    for given, named in (
        (ProfileSession("slow", 2, 5), ProfileSession("slow-r1", 2, 5)),
        (ProfileSession(), ProfileSession("r1")),
    ):
        assert (await orders.start_profile(given), engine.profiled) == (None, named)
        assert (await orders.stop_profile(), engine.profiled) == (None, None)


async def test_sessions_do_not_overlap() -> None:
    engine, orders = utilities()
    assert await orders.stop_profile() == "no session is under way"
    assert not await orders.start_profile(ProfileSession())
    assert await orders.start_profile(ProfileSession()) == "a session is under way" and engine.profiled
