"""A request on its way to another Mell. Events come back in the frames of `deployments.channels.wire`.

    POST /mell/hand-over/requests     HandedRequest, in MessagePack
    200                               a frame with the answer: the model, or the refusal
                                      batches of events, empty ones as heartbeats
                                      the last frame

The caller closes the connection once it does not read the request any more. A connection that breaks ends the request
there, and its caller continues it with the tokens that have arrived.
"""

import msgspec

HEARTBEAT_S = 2.0
"""The longest time between two frames, in seconds."""

WITHOUT_REPLICAS = 2
"""The heartbeats for which a request waits at a Mell without replicas."""


class HandedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request with the output so far: `Submission`, without what only the other Mell can know.

    `request` is the id of the caller, for its events. `body` is vLLM's own message.
    """

    request: str
    label: str
    body: tuple[bytes, ...]
    service_class: str
    arrived_s: float
    hop: int
    outputs: tuple[int, ...]
    model: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandedRequest)


def encode_request(request: HandedRequest) -> bytes:
    """The body of the call."""
    return _encoder.encode(request)


def decode_request(body: bytes) -> HandedRequest:
    """The request in a body. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(body)
