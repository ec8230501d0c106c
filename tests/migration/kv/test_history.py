"""Output restored in the worker, on stand-ins with the fields of vLLM's model runner V1 that `history` uses.

And the part of the output that a grammar accepts; whole outputs of vLLM's grammars are compared in `test_grammars`.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from migration.kv.history import SeededGenerator, drop_budgets, refresh, replay, restore

SEED = 11


@dataclass
class State:
    """vLLM's CachedRequestState."""

    prompt_token_ids: list[int]
    generator: torch.Generator | None = None
    output_token_ids: list[int] = field(default_factory=list)
    sampling_params: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(seed=SEED, thinking_token_budget=None)
    )
    num_prompt_tokens: int = 0


def make_runner(state: State) -> Any:
    """A runner whose batch has the request in its third place."""
    batch = SimpleNamespace(
        req_id_to_index={"v1": 2}, num_prompt_tokens=[0, 0, len(state.prompt_token_ids)], generators={}
    )
    batch.sampling_metadata = None
    batch._make_sampling_metadata = lambda: tuple(state.output_token_ids)
    return SimpleNamespace(requests={"v1": state}, input_batch=batch)


def draw(generator: torch.Generator) -> int:
    """One number, as vLLM's sampler draws it on the CPU."""
    return int(torch.randint(0, 1 << 31, (1,), generator=generator, dtype=torch.long).item())


def drawn(count: int) -> list[int]:
    """The first numbers of a fresh generator."""
    generator = torch.Generator()
    generator.manual_seed(SEED)
    return [draw(generator) for _ in range(count)]


def test_output_is_restored_in_the_list_that_the_batch_refers_to() -> None:
    state = State([1, 2, 3, 4, 5])
    runner, known = make_runner(state), state.output_token_ids
    restore(runner, "v1", 2)
    assert (state.prompt_token_ids, known, state.num_prompt_tokens) == ([1, 2, 3], [4, 5], 3)
    assert runner.input_batch.num_prompt_tokens == [0, 0, 3]
    refresh(runner)
    assert runner.input_batch.sampling_metadata == (4, 5)


def test_the_budget_of_reasoning_counts_output_once() -> None:
    def counted(prompt: list[int], budget: int) -> dict[str, Any]:
        return {"think_count": len(prompt), "budget": budget, "output_tok_ids": []}

    state = State([1, 2, 3, 4, 5])
    state.sampling_params.thinking_token_budget = 7
    runner = make_runner(state)
    holder = SimpleNamespace(_state={2: counted([1, 2, 3, 4, 5], 7)}, _init_state_entry=counted)
    runner.input_batch.thinking_budget_state_holder = holder
    restore(runner, "v1", 2)
    assert holder._state == {2: {"think_count": 3, "budget": 7, "output_tok_ids": [4, 5]}}
    state.output_token_ids.append(6)
    assert holder._state[2]["output_tok_ids"] == [4, 5, 6], "the batch's own list"


def test_a_budget_of_reasoning_leaves_with_its_request() -> None:
    with_budget, without = State([1]), State([1])
    with_budget.sampling_params.thinking_token_budget = 7
    holder = SimpleNamespace(_state={0: {}, 1: {}, 2: {}})
    batch = SimpleNamespace(req_id_to_index={"a": 0, "b": 1}, thinking_budget_state_holder=holder)
    drop_budgets(SimpleNamespace(requests={"a": with_budget, "b": without}, input_batch=batch))
    assert holder._state == {0: {}}, "row 1 has another request now, and row 2 none"


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(input_batch=SimpleNamespace())])
def test_a_runner_without_budgets_has_none_to_drop(runner: Any) -> None:
    drop_budgets(runner)


@pytest.mark.parametrize("outputs", [0, 1, 4])
def test_seeded_request_continues_its_random_draws(outputs: int) -> None:
    state = State([1, 2, 3, 4, 5], torch.Generator())
    runner = make_runner(state)
    restore(runner, "v1", outputs)
    assert runner.input_batch.generators == {2: state.generator}
    assert draw(runner.input_batch.generators[2]) == drawn(5)[outputs]


def test_request_without_a_seed_gets_no_generator() -> None:
    runner = make_runner(State([1, 2, 3]))
    restore(runner, "v1", 1)
    assert runner.input_batch.generators == {}


def test_draw_in_the_middle_of_a_prompt_is_reverted() -> None:
    output: list[int] = [7]
    generator = SeededGenerator(SEED, output)
    draw(generator)
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) == drawn(2)[1]
    output.append(8)
    assert draw(generator) == drawn(3)[2]


class Grammar:
    """Accepts any token."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return True


class Reasoner:
    """A reasoning parser: reasoning ends with the token `END`."""

    END = 9

    def __init__(self, tokenizer: None) -> None: ...

    def is_reasoning_end(self, tokens: list[int]) -> bool:
        return self.END in tokens

    def is_reasoning_end_streaming(self, tokens: list[int], new: list[int]) -> bool:
        return self.END in new


@pytest.mark.parametrize(
    ("tokens", "outputs", "ended", "accepted", "now"),
    [
        ([1, 2, 3, 4, 5, 6], 0, None, [], None),
        ([1, 2, 3, 4, 5, 6], 4, None, [], False),
        ([1, 2, 3, 9, 5, 6], 4, None, [5, 6], True),
        ([1, 2, 3, 4, 5, 9], 4, None, [], True),
        ([1, 2, 3, 9, 5, 9], 4, None, [5, 9], True),
        ([1, 9, 3, 4, 5, 6], 4, None, [3, 4, 5, 6], True),
        ([1, 9, 3, 4, 5, 6], 4, False, [], False),
        ([1, 2, 3, 4, 5, 6], 4, True, [3, 4, 5, 6], True),
    ],
    ids=[
        "nothing of a request without output",
        "nothing while reasoning lasts",
        "what follows reasoning",
        "nothing right after reasoning",
        "a second end is the grammar's",
        "everything after a prompt with the end",
        "nothing if the frontend knows better",
        "everything if the frontend says so",
    ],
)
def test_a_grammar_accepts(
    tokens: list[int], outputs: int, ended: bool | None, accepted: list[int], now: bool | None
) -> None:
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import StructuredOutputRequest

    manager, grammar = StructuredOutputManager.__new__(StructuredOutputManager), Grammar()
    manager.reasoner_cls, manager.enable_in_reasoning, manager.tokenizer = Reasoner, False, None
    structured = StructuredOutputRequest(params=None, reasoning_ended=ended)
    request: Any = SimpleNamespace(
        request_id="v1",
        prompt_token_ids=tokens,
        kv_transfer_params={"mell_output": outputs},
        structured_output_request=structured,
    )
    replay(request, cast(Any, grammar), manager)
    assert (grammar.accepted, structured.reasoning_ended) == (accepted, now)
