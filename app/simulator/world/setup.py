"""What a simulation is of: the cluster, the clockwork and the limits. Costs are `app.simulator.costs.costs`."""

from dataclasses import dataclass, field

from policies.decision.limits import Limits
from policies.model import Tokens


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster of replicas of `capacity` tokens of KV cache, `gpus_per_node` to a node, at most `max_gpus` in all.

    `decode_rate` is tokens per second and request (where the costs do not say otherwise), `epoch_s` the seconds
    between epochs, `horizon_s` the seconds after which nothing arrives and the simulation ends. With `batched` an
    epoch decides all its changes together; without, one by one (the paper's Algorithm 1). At most `moves_at_once` moves
    are under way, `moves_per_replica` of them from or to one replica (None: any number).
    """

    capacity: Tokens
    decode_rate: float = 25.0
    epoch_s: float = 1.0
    gpus_per_node: int = 8
    horizon_s: float = 3600.0
    max_gpus: int | None = None
    batched: bool = True
    limits: Limits = field(default_factory=Limits)
    moves_at_once: int | None = None
    moves_per_replica: int | None = None

    @property
    def slotted_rate(self) -> float:
        """Tokens per second and request where time is in slots of an epoch: each slot has a whole number of tokens."""
        return max(1, round(self.decode_rate * self.epoch_s)) / self.epoch_s
