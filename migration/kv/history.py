"""Exact continuation of a request in another engine: the tokens it has output so far stay output, not prompt.

vLLM's API has no requests that begin with output. A moved request is added with its output at the end of its prompt and
the number of these tokens; then, in time order:
    replay            where the engine compiles its grammar: that accepts the output, or what follows its reasoning
    split             scheduler half, when it is first scheduled: the scheduler counts the output as output
    restore           worker half, before it is first sampled: penalties and the budget of reasoning count the output
                      as output, and a seeded generator is advanced past it
    drop_budgets      worker half, when it has left: its budget of reasoning ends with it

Model runner V2 takes the output from the scheduler and draws by seed and position: it needs no `restore`.

These functions write private fields of vLLM's requests and batch, of the pinned version.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


def replay(request: "Request", grammar: "StructuredOutputGrammar", manager: "StructuredOutputManager") -> None:
    """Have the grammar of a continued request accept its output, token by token as it came.

    `manager` decides about each token, as in the engine before: those of reasoning are not the grammar's, and what
    stands behind the end of the format neither. A grammar that gets all at once may refuse them.

    Raises:
        ValueError: the output does not follow the grammar.
    """
    params = request.kv_transfer_params or {}
    outputs: int = params.get("mell_output", 0)
    if not outputs:
        return
    structured, tokens = request.structured_output_request, params.get("mell_context") or request.prompt_token_ids
    assert structured is not None
    past, cut = copy.copy(structured), len(tokens) - outputs
    past.grammar = grammar
    came = SimpleNamespace(
        use_structured_output=True,
        request_id=request.request_id,
        structured_output_request=past,
        prompt_token_ids=tokens[:cut],
        all_token_ids=tokens[:cut],
    )
    for token in tokens[cut:]:
        came.all_token_ids.append(token)
        if not manager.accept_tokens(came, [token]):
            raise ValueError("the output does not follow the grammar")
    structured.reasoning_ended, structured.reasoner = past.reasoning_ended, past.reasoner


def split(request: "Request", outputs: int, new: "NewRequestData") -> bool:
    """Turn the last `outputs` tokens of a request's prompt into its output; True if the worker has to `restore` it.

    `new` is the scheduler's message to the worker for the request's first step. Model runner V1 builds its batch from
    the message's prompt, which therefore stays whole until `restore`; V2 takes the shorter prompt.
    """
    tokens = request.prompt_token_ids
    cut = len(tokens) - outputs
    request.prompt_token_ids = tokens[:cut]
    request.num_prompt_tokens = cut
    request._output_token_ids.extend(tokens[cut:])
    if new.prefill_token_ids is None:
        return True
    new.prompt_token_ids = request.prompt_token_ids
    return False


def restore(runner: Any, request_id: str, outputs: int) -> None:
    """Turn the last `outputs` tokens of a new request's prompt into its output in the worker's model runner V1."""
    state, batch = runner.requests[request_id], runner.input_batch
    cut = len(state.prompt_token_ids) - outputs
    # In place: the batch refers to this list, which is still empty.
    state.output_token_ids.extend(state.prompt_token_ids[cut:])
    state.prompt_token_ids = state.prompt_token_ids[:cut]
    state.num_prompt_tokens = cut
    index = batch.req_id_to_index[request_id]
    batch.num_prompt_tokens[index] = cut
    if state.sampling_params.thinking_token_budget is not None:
        _restore_budget(batch.thinking_budget_state_holder, index, state)
    if state.generator is not None and state.generator.device.type == "cpu":
        state.generator = SeededGenerator(state.sampling_params.seed, state.output_token_ids)
        batch.generators[index] = state.generator


def _restore_budget(holder: Any, index: int, state: Any) -> None:
    """Count the output against the budget of reasoning once: vLLM has counted it as prompt, and will as output."""
    entry = holder._init_state_entry(state.prompt_token_ids, state.sampling_params.thinking_token_budget)
    holder._state[index] = {**entry, "output_tok_ids": state.output_token_ids}


def drop_budgets(runner: Any) -> None:
    """Drop the budgets of reasoning whose requests have left the batch of model runner V1.

    vLLM keeps one if it moves a request without a budget into the row, and later forces the end of reasoning upon that
    request. In its own server this takes a client that leaves while its request reasons.
    """
    batch: Any = getattr(runner, "input_batch", None)
    holder = getattr(batch, "thinking_budget_state_holder", None)
    if holder is None or not holder._state:
        return
    rows = {index: name for name, index in batch.req_id_to_index.items()}
    for index in list(holder._state):
        owner = runner.requests.get(rows.get(index))
        if owner is None or owner.sampling_params.thinking_token_budget is None:
            del holder._state[index]


def refresh(runner: Any) -> None:
    """Rebuild the batch's sampling metadata, after `restore`."""
    runner.input_batch.sampling_metadata = runner.input_batch._make_sampling_metadata()


def draws_one_number() -> bool:
    """True if vLLM's sampler on CPUs draws as `SeededGenerator` repeats it; that of 0.29 draws another way."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    return "randint" in TopKTopPSampler.forward_cpu.__code__.co_names


class SeededGenerator(torch.Generator):
    """A CPU generator advanced past a request's output, for which vLLM has drawn one number per token.

    `output` is the live list of output tokens. vLLM reverts a draw (one sampled in the middle of a prompt) by setting
    the offset back by four, as on a GPU; PyTorch's own CPU generator has no offset and raises, which would end the
    engine.
    """

    def __new__(cls, seed: int, output: Sequence[int]) -> Self:
        """A generator on the CPU; PyTorch's `__new__` takes no seed."""
        made: Self = super().__new__(cls)
        return made

    def __init__(self, seed: int, output: Sequence[int]) -> None:
        self._seed = seed
        self._output = output
        self.rewind()

    def get_offset(self) -> int:
        """Always 0: vLLM uses the offset only to compute the one for `set_offset`."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Return to the end of the output, for every `offset`."""
        self.rewind()

    def rewind(self) -> None:
        """Return to the end of the output: seed anew and repeat its draws."""
        self.manual_seed(self._seed)
        for _ in self._output:
            # The draw of `TopKTopPSampler.forward_cpu` (vllm/v1/sample/ops/topk_topp_sampler.py).
            torch.randint(0, 1 << 31, (1,), generator=self, dtype=torch.long)
