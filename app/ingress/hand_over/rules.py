"""The decisions of a hand-over: whether it may begin, and which requests stay."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

from migration.protocol.request import ModelIdentity, RequestSpec, Trait

PROTOCOL = 2
"""The version of requests and answers between the two. Both ends refuse any other."""

PROTOCOL_HEADER = "X-Mell-Hand-Over"


@dataclass(frozen=True, slots=True)
class Standing:
    """The properties of a Mell that decide on a hand-over. `id` is its application's, new with every start of Serve.

    `model` is the fingerprint of its replicas (None: none answers), `tied` the traits of requests that they cannot
    continue, and `to` the Mell that it hands its own requests over to.
    """

    protocol: int
    id: str
    model: str | None
    tied: tuple[str, ...]
    to: str | None

    @classmethod
    def parse(cls, document: Any) -> Self:
        """The standing in a document, which may have more. Raises ValueError if there is none."""
        match document:
            case {
                "protocol": int(protocol),
                "id": str(id),
                "model": str() | None as model,
                "tied": [*tied],
                "to": str() | None as to,
            }:
                return cls(protocol, id, model, tuple(map(str, tied)), to)
        raise ValueError("the answer is not that of a Mell")

    def document(self) -> dict[str, Any]:
        """The standing as JSON has it."""
        return asdict(self) | {"tied": list(self.tied)}


def why_refused(url: str, own: Standing, other: Standing) -> str | None:
    """The reason why nothing is handed over to the Mell at `url`; None if requests may be."""
    if other.protocol != own.protocol:
        age = "a newer" if other.protocol > own.protocol else "an older"
        return (
            f"{url} is {age} Mell: it has version {other.protocol} of hand-overs, and this one version {own.protocol}"
        )
    if other.id == own.id:
        return f"{url} is this Mell itself"
    if own.to not in (None, url):
        return f"this Mell hands over to {own.to}: undo that first"
    if other.to is not None:
        return f"{url} hands its requests over to {other.to}, and takes none"
    if own.model is None:
        return "no replica of this Mell has answered: try again"
    if other.model is None:
        return f"no replica of {url} has answered: try again"
    if other.model != own.model:
        return (
            f"{url} does not serve exactly the same model: requests cannot be continued there, and end here. "
            f"There: {other.model}; here: {own.model}"
        )
    if unknown := sorted(set(other.tied) - set(Trait)):
        return f"{url} cannot continue requests with {', '.join(unknown)}, which this Mell does not know"
    return None


def takes_requests(other: Standing, model: str) -> bool:
    """True if the target of a hand-over, which was away, would take requests of this model again."""
    return (other.protocol, other.model, other.to) == (PROTOCOL, model, None)


def served_by_both(own: Standing, other: Standing) -> ModelIdentity:
    """The model of two Mells neither of which refuses the other, and the traits that either cannot continue."""
    return ModelIdentity(own.model or "", frozenset(map(Trait, (*own.tied, *other.tied))))


def why_stays(spec: RequestSpec, outputs: int, tied: Collection[Trait]) -> str | None:
    """The reason why a request with that many output tokens is not handed over; None if it is."""
    if spec.adapter is not None:
        return "LoRA adapter"
    if outputs and (traits := sorted(spec.traits & set(tied))):
        return f"cannot be continued exactly: {', '.join(traits)}"
    return None
