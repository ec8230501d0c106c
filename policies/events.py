"""What happened since the last epoch: the only thing besides the cluster itself that a decision depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.model import ReplicaId, RequestId, Tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants a replica; `tokens` is what it holds now (its prompt, or prompt and output)."""

    id: RequestId
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Events:
    """The changes between two epochs, each kind in the order in which it happened.

    `sizes` maps a request to the tokens that it holds now; requests that did not change may be left out.
    `moved` and `stayed` say how moves ended that were still under way: at their target, or back at their source.
    `started` are replicas that now accept work, `lost` ones that are gone with all that was on them.
    """

    sizes: Mapping[RequestId, Tokens] = field(default_factory=dict)
    departed: Sequence[RequestId] = ()
    arrived: Sequence[Arrival] = ()
    moved: Sequence[RequestId] = ()
    stayed: Sequence[RequestId] = ()
    started: Sequence[ReplicaId] = ()
    lost: Sequence[ReplicaId] = ()
