"""Stock vLLM's answers to undisturbed requests, with the alternatives at ties.

A greedy answer takes the likeliest token. Rounding depends on the other requests of the batch, and on whether a token's
KV was computed by prefill or by decode; so if two tokens are equally likely up to rounding, either is right. Ties are
rare, and the two answers have little in common after one.
"""

from collections.abc import Iterator, Mapping, Sequence

from app.client.api import ApiClient
from benchmarks.chaos.offers import Offer, text_of

TIE = 2e-5
"""The largest difference of two log-probabilities that counts as a tie. In stock vLLM's own answers (float32 on the
CPU, 20,000 tokens), other requests of the batch changed such differences by at most 1.1e-5.
"""

_NAME = "token_id:"

Tokens = tuple[int, ...]


async def stock_texts(server: ApiClient, model: str, offer: Offer) -> list[str]:
    """The texts of stock vLLM's answer and of all answers with the other token at ties, as Mell writes text.

    `server` is a stock vLLM server. Raises ClientError.
    """
    return [text_of(offer.prompt, answer) for answer in await _answers(server, model, offer, ())]


async def _answers(server: ApiClient, model: str, offer: Offer, begun: Tokens) -> list[Tokens]:
    """The answers that begin with `begun`."""
    if len(begun) == offer.output:
        return [begun]
    asked = {
        "prompt": [*offer.prompt, *begun],
        "max_tokens": offer.output - len(begun),
        "stream": False,
        "stream_options": None,
        "return_token_ids": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = (await server.complete(offer.body(model) | asked))["choices"]
    tokens: Tokens = tuple(choice["token_ids"])
    answers = [(*begun, *tokens)]
    for place, other in _ties(tokens, choice["logprobs"]["top_logprobs"]):
        answers += await _answers(server, model, offer, (*begun, *tokens[:place], other))
    return answers


def _ties(tokens: Tokens, tops: Sequence[Mapping[str, float]]) -> Iterator[tuple[int, int]]:
    """The ties of an answer: the index, and the other token."""
    for place, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        first, second = sorted(top, key=lambda name: -top[name])[:2]
        if top[first] - top[second] < TIE:
            both = (int(name.removeprefix(_NAME)) for name in (first, second))
            yield from ((place, other) for other in both if other != token)
