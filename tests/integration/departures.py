"""The differences from vLLM's server that Mell has on purpose. Everything else is a fault."""

from collections.abc import Mapping

_EARLIER = "refused before vLLM reads it, with a type and a code of Mell's"

DEPARTURES: Mapping[str, tuple[int, int, str]] = {
    name: (400, 400, _EARLIER)
    for name in (
        "seed 9223372036854775808",
        "n two",
        "prompt [1, 'a']",
        "prompt ['a', 1]",
        "prompt [-1]",
        "stream perhaps",
        "stream_options 5",
        "messages hello",
        "messages [5]",
        "messages [{'role': 'user', 'content': [{'type': 'image_url', 'image_u",
        "Anthropic's messages hello",
        "too many stop sequences",
    )
}
"""The status of vLLM's server, Mell's, and the reason, by the name of an odd case."""
