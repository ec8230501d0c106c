"""A model of an ingress process: its application, and its requests on the replicas of its pool."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.types import ASGIApp

from app.frontend.guard.bodies import BodyLimits
from app.ingress.access.admission import FirstTokenDeadlines
from app.ingress.adapters import AdapterOrders
from app.ingress.config import ModelConfig, Tenancy
from app.ingress.engine_orders import EngineOrders
from app.ingress.streams.placing import Placer
from app.ingress.streams.streams import Streams
from app.service.api import VllmApi
from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.api.protocols import EngineApi, RemoteReplicas
from deployments.serve.membership import Membership
from policies.model import PoolId


@dataclass(frozen=True, slots=True)
class IngressModel:
    """Implements `GuardedModel`. `orders` go to the replicas of the pool alone."""

    config: ModelConfig
    pool: PoolId
    api: VllmApi
    replicas: RemoteReplicas[EngineApi]
    membership: Membership
    placer: Placer
    streams: Streams
    orders: EngineOrders
    adapters: AdapterOrders
    deadlines: FirstTokenDeadlines

    @property
    def id(self) -> str:
        """See `GuardedModel.id`."""
        return self.config.model_id

    @property
    def names(self) -> frozenset[str]:
        """See `GuardedModel.names`."""
        return self.api.names

    @property
    def app(self) -> ASGIApp:
        """See `GuardedModel.app`."""
        return self.api.app

    @property
    def limits(self) -> BodyLimits:
        """See `GuardedModel.limits`."""
        return self.api.limits

    @property
    def tenancy(self) -> Tenancy:
        """See `GuardedModel.tenancy`."""
        return self.config.tenancy


async def order_where_found(pools: Sequence[PoolId], order: Callable[[PoolId], Awaitable[MoveAnswer]]) -> MoveAnswer:
    """The answer of the first pool that knows the request or the replica of an order; else that none does, with the
    replicas of all.
    """
    unknown: list[MoveRejected] = []
    for pool in pools:
        answer = await order(pool)
        if isinstance(answer, MoveAccepted) or answer.status != HTTPStatus.NOT_FOUND:
            return answer
        unknown.append(answer)
    replicas = sorted(replica for each in unknown for replica in each.details.get("replicas", ()))
    return replace(unknown[0], details={**unknown[0].details, **({"replicas": replicas} if replicas else {})})


def of_one_pool(answer: MoveAnswer, replicas: Sequence[str]) -> MoveAnswer:
    """The answer to an order about several replicas that no pool knows, unless each pool knows some of them."""
    if isinstance(answer, MoveAccepted) or answer.status != HTTPStatus.NOT_FOUND:
        return answer
    if set(replicas) <= set(answer.details.get("replicas", ())):
        return MoveRejected(422, f"{' and '.join(replicas)} are replicas of two models: a pair has one")
    return answer
