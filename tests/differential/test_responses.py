"""Responses as vLLM's own frontend streams them: one form however an engine's tokens were cut into outputs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.parser.parser_manager import ParserManager

from tests.differential.answers import Json, joined, normalised

THINK, THOUGHT = 510, 511
PIECES = {THINK: "<think>", THOUGHT: "</think>"} | {token: chr(97 + token) for token in range(26)}
REASONING = [0, 1, 2, 3, 4, 5, 6, 7]


def streamed(outputs: Sequence[Sequence[int]]) -> Json:
    """The events of an answer whose prompt ends within reasoning, in the form in which answers are compared."""
    return normalised(joined(sent(outputs)))


def sent(outputs: Sequence[Sequence[int]]) -> list[Json]:
    """The same events as vLLM sends them."""
    pieces: Any = SimpleNamespace(get_vocab=lambda: {text: token for token, text in PIECES.items()})
    made = ParserManager.get_parser(reasoning_parser_name="deepseek_v3")
    assert made is not None
    parser = made(pieces, chat_template_kwargs={"enable_thinking": True})
    processor, request = SimpleStreamingEventProcessor(), ResponsesRequest(input="so")
    events: list[Any] = []
    for place, tokens in enumerate(outputs, 1):
        text = "".join(PIECES[token] for token in tokens)
        message = parser.parse_delta(text, list(tokens), request, [THINK], finished=place == len(outputs))
        for delta in split_delta(message) if message else ():
            target, call = processor.resolve_target_state(delta)
            if processor.needs_transition(target, call):
                events += [*processor.close_current(), *processor.open(target, call)]
            events += processor.emit_delta(delta, SimpleNamespace())
    events += processor.close_current()
    return [event.model_dump(mode="json") for event in events]


CUTS = [[[token] for token in REASONING], [REASONING], [REASONING[:3], REASONING[3:]], [REASONING[:1], REASONING[1:]]]


@pytest.mark.parametrize("outputs", CUTS, ids=str)
def test_cuts_of_reasoning_do_not_matter(outputs: list[list[int]]) -> None:
    events = streamed(outputs)
    assert events == streamed(CUTS[0])
    assert [event["type"] for event in events].count("response.reasoning_text.delta") == 1 and len(events) == 6


@pytest.mark.parametrize("outputs", CUTS, ids=str)
def test_reasoning_that_ends_is_another_answer(outputs: list[list[int]]) -> None:
    """An end of reasoning that an engine forces upon a request without a budget adds the events of a text."""
    ended = [*outputs, [THOUGHT], [8]]
    assert len(streamed(ended)) == 12
    assert streamed(ended) == streamed([[token] for tokens in ended for token in tokens])


def test_a_mark_within_reasoning_is_sent_or_not_by_the_cut_and_does_not_matter() -> None:
    alone, beside, without = [[0], [THINK], [1]], [[0], [THINK, 1]], [[0], [1]]
    texts = [next(event["text"] for event in sent(each) if "text" in event) for each in (alone, beside, without)]
    assert texts == ["ab", "a<think>b", "ab"]
    assert streamed(alone) == streamed(beside) == streamed(without) != streamed([[0], [2]])
