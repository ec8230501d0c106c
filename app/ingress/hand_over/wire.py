"""Requests on their way to another Mell, and their events on the way back, over one WebSocket of each ingress process.

    GET /mell/hand-over/requests   the upgrade, with the admin key and the version of hand-overs
    messages of the caller         `HandedRequest` and `LeftRequest`, in MessagePack
    messages of the other Mell     frames of `deployments.channels.wire`: the answer to each request, by its number,
                                   and batches of the events of all requests

A request ends there once the caller has left it. The end of the connection ends all its requests there, and the caller
continues them with the tokens that have arrived.
"""

import msgspec

PING_S = 2.0
"""The time between two pings of either end, in seconds."""

SILENCE_S = 10.0
"""The longest wait for the answer to a ping, in seconds."""

LONGEST_HEADER = "X-Mell-Longest-Message"
"""The header of the answer to the upgrade: the size of the longest message that is read, in bytes."""


class HandedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="request"):
    """A request with the output so far: `Submission`, without what only the other Mell can know.

    `number` is its own on the connection, `request` the id of the caller, for its events. `body` is vLLM's own message.
    """

    number: int
    request: str
    label: str
    body: tuple[bytes, ...]
    service_class: str
    arrived_s: float
    hop: int
    outputs: tuple[int, ...]
    model: str


class LeftRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="left"):
    """The caller does not read the request of that number any more."""

    number: int


_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[HandedRequest | LeftRequest]" = msgspec.msgpack.Decoder(HandedRequest | LeftRequest)


def encode_message(message: HandedRequest | LeftRequest) -> bytes:
    """A message of the caller."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> HandedRequest | LeftRequest:
    """The message in some bytes. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)
