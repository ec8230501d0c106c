"""What stock vLLM answers to whom nothing happens, and what it might have answered as well.

A greedy answer takes the likeliest token. Rounding depends on what else is in the batch, and on whether a token's KV
was computed by prefill or by decode; so where two tokens are as likely but for rounding, either is right. That is rare,
and from there on the two answers have little in common.
"""

from collections.abc import Iterator, Mapping, Sequence

from app.client.api import ApiClient
from benchmarks.chaos.offers import Offer, text_of

TIE = 2e-5
"""Two tokens tie if their log-probabilities differ by less. In stock vLLM's own answers (float32 on the CPU, 20,000
tokens), what else was in the batch moved that difference by 1.1e-5 at most.
"""

_NAME = "token_id:"

Tokens = tuple[int, ...]


async def stock_texts(server: ApiClient, model: str, offer: Offer) -> list[str]:
    """As Mell writes them: the answer, then those that take the other token where two tie.

    `server` is a stock vLLM server. Raises ClientError.
    """
    return [text_of(offer.prompt, answer) for answer in await _answers(server, model, offer, ())]


async def _answers(server: ApiClient, model: str, offer: Offer, begun: Tokens) -> list[Tokens]:
    """The answers that begin so."""
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
    """Where two tokens tie: the place, and the token that was not taken."""
    for place, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        first, second = sorted(top, key=lambda name: -top[name])[:2]
        if top[first] - top[second] < TIE:
            both = (int(name.removeprefix(_NAME)) for name in (first, second))
            yield from ((place, other) for other in both if other != token)
