"""Continuing a request in another engine exactly: what was output elsewhere is output here too, not prompt.

vLLM has no word for a request that begins with output. It comes with its output at the end of its prompt, and with how
many tokens that is; then, in time order:
    replay            scheduler half, as it is added: a grammar accepts the output, so that it allows what comes next
    split             scheduler half, as it is first scheduled: `min_tokens` and `max_tokens` count output
    restore           worker half, before it is first sampled: penalties count output, and a seeded generator stands
                      where it stood

Model runner V2 takes the output from the scheduler, and draws by seed and position: it needs nothing to be restored.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


def replay(request: "Request", outputs: int) -> None:
    """Have the grammar accept the output once it is compiled; vLLM waits for it before it schedules the request."""
    structured = request.structured_output_request
    if structured is None:
        return
    compiling, output = structured._grammar, list(request.prompt_token_ids[-outputs:])
    assert isinstance(compiling, Future)
    replayed: Future[StructuredOutputGrammar] = Future()

    def advance(compiled: "Future[StructuredOutputGrammar]") -> None:
        try:
            grammar = compiled.result()
            if not grammar.accept_tokens(request.request_id, output):
                raise ValueError("the output does not follow the grammar")
        except Exception as error:
            replayed.set_exception(error)
        else:
            replayed.set_result(grammar)

    structured.grammar = replayed
    compiling.add_done_callback(advance)


def split(request: "Request", outputs: int, new: "NewRequestData") -> bool:
    """Make the last `outputs` tokens of a request's prompt its output; whether the worker has to `restore` it.

    `new` is what the worker is told of it in this step, its first: V1's batch is made from its prompt.
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
    """Make the last `outputs` tokens of a new request's prompt its output in the worker's first model runner."""
    state, batch = runner.requests[request_id], runner.input_batch
    cut = len(state.prompt_token_ids) - outputs
    # The batch refers to this list, which holds nothing yet.
    state.output_token_ids.extend(state.prompt_token_ids[cut:])
    state.prompt_token_ids = state.prompt_token_ids[:cut]
    state.num_prompt_tokens = cut
    index = batch.req_id_to_index[request_id]
    batch.num_prompt_tokens[index] = cut
    if state.generator is not None and state.generator.device.type == "cpu":
        state.generator = SeededGenerator(state.sampling_params.seed, state.output_token_ids)
        batch.generators[index] = state.generator


def refresh(runner: Any) -> None:
    """Have the batch's sampling metadata made anew, after `restore`."""
    runner.input_batch.sampling_metadata = runner.input_batch._make_sampling_metadata()


def rewind(runner: Any) -> None:
    """Set seeded generators to where the output's end is: vLLM throws away what it samples after a load that failed."""
    for state in runner.requests.values():
        if isinstance(state.generator, SeededGenerator):
            state.generator.rewind()


class SeededGenerator(torch.Generator):
    """A CPU generator that stands where so many tokens of output leave it: vLLM draws one number for each.

    vLLM takes a draw back by setting the offset four back, as on a GPU, when it has sampled in the middle of a prompt;
    a generator of PyTorch's on the CPU has no offset and raises, which would end the engine.
    """

    def __new__(cls, seed: int, output: Sequence[int]) -> Self:
        """On the CPU."""
        made: Self = super().__new__(cls)
        return made

    def __init__(self, seed: int, output: Sequence[int]) -> None:
        self._seed = seed
        self._output = output
        self.rewind()

    def get_offset(self) -> int:
        """Only differences count."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Go back to where the output's end is."""
        self.rewind()

    def rewind(self) -> None:
        """Stand where the output's end is."""
        self.manual_seed(self._seed)
        for _ in self._output:
            # As `TopKTopPSampler.forward_cpu` does (v1/sample/ops/topk_topp_sampler.py).
            torch.randint(0, 1 << 31, (1,), generator=self, dtype=torch.long)
