"""The set-up of a simulation: cluster, epochs and limits. Costs are in `simulator.costs.costs`."""

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter

from policies.cost.service import ServiceLevel
from policies.cost.steps import HopCosts
from policies.decision.limits import Limits, Sizes
from policies.memory.pairing import PairingTerms
from policies.model import Bytes, Tokens
from policies.precedence import NO_CLASSES, ServiceClasses
from policies.prefix.routing import Routing


class Exchange(StrEnum):
    """How the members of a group give each other the KV of the layers that they drop."""

    IN_TURN = "layer by layer, in turn"
    """One layer of one member at a time, while steps go on; the giver stops for the last blocks of each layer."""
    TOGETHER = "layer by layer, together"
    """One layer of every member at a time."""
    AT_ONCE = "all at once"
    """All layers of all members, while all members stand still."""


@dataclass(frozen=True, slots=True)
class PairSetup:
    """Groups of replicas with a part of the `layers` each, in a pool with a constant number of replicas.

    A group adds `gain` tokens to the capacities of its members. `layer_bytes` are the parameters of a layer, loaded at
    `load_bytes_per_s` where a group is undone. With `always`, groups are there from the start, and stay; else
    they are undone if it `restores`.
    """

    gain: Tokens
    layers: int
    layer_bytes: Bytes
    load_bytes_per_s: float
    hop: HopCosts
    terms: PairingTerms = field(default_factory=PairingTerms)
    always: bool = False
    restores: bool = True
    exchange: Exchange = Exchange.IN_TURN


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster of replicas with `capacity` tokens of KV cache each, `gpus_per_node` per node.

    With `by_machine`, a node is a machine that costs money until its last replica has closed: replicas open on machines
    in use first, decisions empty machine by machine, and machines are counted.

    At least `min_replicas` replicas are open from the start and stay, and at most `max_gpus` exist. `caps` are further
    maximums, each from its time in seconds on; no replica is closed because of a cap.

    `decode_rate` is in tokens per second and request, and applies if the costs have no decode times. `epoch_s` are the
    seconds between epochs, `horizon_s` the seconds until the end of the simulation. With `batched` an epoch decides all
    its changes together, otherwise one by one (the paper's Algorithm 1). At most `moves_at_once` moves are under way,
    and at most `moves_per_replica` from or to one replica (None: no limit). With a `service` level, which needs costs
    with step times, limits of zero follow from it and from measurements. `classes` order requests, in the engines, too.

    Replicas have prefix caches with blocks of `block_tokens` tokens (0: no caches), which decide on placements by
    `routing`. They need costs with prefills. With `copies`, replicas copy prefixes from each other, over the links of
    moves. `sizes` are those for which decisions want room on a replica. `prefill_gpus` replicas are for prefills alone,
    with costs of moves; what the others compute `returns` to these where that pays. With `auto_prefills` that is their
    maximum. Replicas with `pairs` may form groups, which share the room of dropped layers.
    """

    capacity: Tokens
    decode_rate: float = 25.0
    epoch_s: float = 1.0
    gpus_per_node: int = 8
    by_machine: bool = False
    horizon_s: float = 3600.0
    min_replicas: int = 0
    max_gpus: int | None = None
    caps: tuple[tuple[float, int], ...] = ()
    batched: bool = True
    limits: Limits = field(default_factory=Limits)
    moves_at_once: int | None = None
    moves_per_replica: int | None = None
    service: ServiceLevel | None = None
    block_tokens: int = 0
    routing: Routing = Routing.TREE
    copies: bool = False
    prefill_gpus: int = 0
    auto_prefills: bool = False
    returns: bool = True
    sizes: Sizes = Sizes.MARGINAL
    classes: ServiceClasses = NO_CLASSES
    pairs: PairSetup | None = None

    def most_gpus(self, now: float) -> int | None:
        """The maximum number of replicas at a time; None without a maximum."""
        index = bisect_right(self.caps, now, key=itemgetter(0)) - 1
        capped = [self.caps[index][1]] if index >= 0 else []
        return min([*capped, *([] if self.max_gpus is None else [self.max_gpus])], default=None)

    @property
    def slotted_rate(self) -> float:
        """Tokens per second and request with slots of one epoch: each slot has a whole number of tokens."""
        return max(1, round(self.decode_rate * self.epoch_s)) / self.epoch_s
