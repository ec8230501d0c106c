"""The port of Mell's own routes to the ingress replica."""

from typing import Any, Protocol

from app.ingress.access.admission import Gate
from app.ingress.access.operators import OperatorAccess
from app.ingress.engine_orders import EngineOrders
from app.ingress.hand_over.orders import HandOverOrders
from app.ingress.hand_over.taking import TakenRequests
from app.ingress.http.draining import Draining
from app.ingress.http.orders import CopyPrompt, LoadAdapter, MatchOrder, PromptOrder
from app.ingress.node_orders import NodeOrders
from app.ingress.telemetry.requests import RequestTelemetry
from app.ingress.telemetry.scrape import MetricsScope
from app.settings import IngressSettings
from deployments.api.calls import MoveAnswer
from migration.protocol.messages import PathRequest
from migration.protocol.request import IngressId, RequestSpec
from policies.decision.limits import Mode
from policies.model import Role


class ControlBackend(Protocol):
    """The port of these routes to the ingress replica `id`. `application` is its name in Serve.

    With several models there is no hand-over: `hand_over` and `taken` are None.
    """

    id: IngressId
    application: str
    draining: Draining
    gate: Gate
    operators: OperatorAccess
    orders: EngineOrders
    nodes: NodeOrders
    telemetry: RequestTelemetry
    settings: IngressSettings

    @property
    def hand_over(self) -> HandOverOrders | None:
        """The hand-over to another Mell."""
        ...

    @property
    def taken(self) -> TakenRequests | None:
        """The requests of another Mell."""
        ...

    def health(self) -> str | None:
        """The reason why no request can be served now, None if requests can be served."""
        ...

    def version(self) -> dict[str, str]:
        """Versions of Mell, vLLM, Ray and torch."""
        ...

    async def metrics(self, scope: MetricsScope) -> bytes:
        """The body of `/metrics`."""
        ...

    async def document(self) -> bytes:
        """The body of `/openapi.json`; its making takes a second or two."""
        ...

    async def state(self) -> dict[str, Any]:
        """The body of `/mell/state`."""
        ...

    async def migrations(self) -> dict[str, Any]:
        """The body of `/mell/migrations`."""
        ...

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the scheduler's last epoch, without a call to any replica."""
        ...

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move a request to `target`, or to a replica of the scheduler's choice. `reference` is its id or label."""
        ...

    async def drain(self, replica: str) -> MoveAnswer:
        """Drain a replica, then stop it."""
        ...

    async def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        """Set a replica's role; with None, the scheduler assigns it again."""
        ...

    async def set_memory(self, replica: str, blocks: int | None) -> MoveAnswer:
        """Set the size of a replica's KV pool; with None, that of its start."""
        ...

    async def set_asleep(self, replica: str, asleep: bool) -> MoveAnswer:
        """Have a replica fall asleep, or wake."""
        ...

    async def set_model_asleep(self, model: str, asleep: bool) -> MoveAnswer:
        """Have all replicas of a model fall asleep, or one of them wake. Raises ApiError for a name without a model."""
        ...

    async def pair(self, lower: str, upper: str) -> MoveAnswer:
        """Form a pair of two replicas, which keep the lower and the upper layers."""
        ...

    async def unpair(self, replica: str) -> MoveAnswer:
        """Undo the pair of a replica."""
        ...

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """Set the scheduler's mode, until the application is deployed again."""
        ...

    async def set_level(
        self, model: str | None, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        """Set a class's service level for a model, None: the only one. Of the times, None stays as it is.

        Raises ApiError for a name without a model.
        """
        ...

    async def set_bounds(self, model: str | None, least: int, most: int) -> MoveAnswer:
        """Set the bounds on the number of a model's replicas, None: the only one. Raises ApiError as `set_level`."""
        ...

    async def match(self, order: MatchOrder) -> dict[str, Any]:
        """The body of `/mell/cache/match`. Raises ApiError."""
        ...

    async def names(self, order: PromptOrder) -> tuple[int, ...] | None:
        """The names of the blocks of an order; None: all blocks. Raises ApiError."""
        ...

    def orders_for(self, order: PromptOrder) -> EngineOrders:
        """The orders to the replicas of an order's model, without a prompt to all replicas. Raises ApiError."""
        ...

    async def prefix(self, order: CopyPrompt) -> RequestSpec:
        """A request with the prompt of an order. Raises ApiError."""
        ...

    async def load_adapter(self, order: LoadAdapter) -> str:
        """Load a LoRA adapter. Returns the answer's text. Raises ApiError."""
        ...

    async def unload_adapter(self, name: str) -> str:
        """Unload a LoRA adapter. Returns the answer's text. Raises ApiError."""
        ...
