"""vLLM's own client of engines, connected to Mell's core; refusals become HTTP statuses, and private members go."""

from collections.abc import AsyncGenerator
from functools import cached_property
from http import HTTPStatus
from typing import Any

from vllm import envs
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from app.frontend.calls import CURRENT
from app.frontend.core import ClusterCore
from app.ingress.errors import ApiError
from deployments.engine.vllm_messages import EngineCoreRequest
from migration.concurrency import Tasks
from migration.protocol.ports import Loss, LossKind
from migration.run.reader import NotServed


class RequestLost(GracefulHTTPError, GenerationError):
    """No replica takes a request, or continues it.

    vLLM's application passes the first class on from an engine client as it is, and ends a stream by the second one
    without a traceback.
    """

    def __init__(self, error: ApiError) -> None:
        status = HTTPStatus(error.status)
        super().__init__(error.message, status)
        self.status_code = status


class ClusterLLM(AsyncLLM):
    """vLLM's `AsyncLLM` over a `ClusterCore`, which is set once, right after the construction."""

    core: ClusterCore
    max_prompt_tokens: int | None = None

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a call before its response begins, if no replica is running.

        vLLM calls it again with a `request_id` when the request is added; its placement then decides.

        Raises:
            RequestLost: 503.
        """
        if request_id is None and not self.core.serving:
            loss = Loss(LossKind.UNAVAILABLE, "no replica accepts requests")
            _note(ApiError.of(loss))
            raise to_vllm_error(loss)
        try:
            super().check_admission(n, request_id)
        except GracefulHTTPError as error:
            _note(as_api_error(error))
            raise

    async def add_request(self, request_id: str, prompt: Any, params: Any, **others: Any) -> RequestOutputCollector:
        """Add a request, and wait until replicas have taken it.

        The members of a request that choose an engine, or a state on one, are Mell's and not the client's.

        Raises:
            VLLMError: with the HTTP status of the refusal.
        """
        if isinstance(prompt, AsyncGenerator):
            raise VLLMValidationError("input streaming is not available: a request must be complete to be moved")
        if isinstance(params, SamplingParams):
            params.extra_args = None  # vLLM reads connectors' parameters in it before anybody has checked them.
        self._check_prompt(prompt)
        call = self.core.expect(getattr(params, "n", 1), CURRENT.get())
        own = {"session_id": call.id, "data_parallel_rank": None}
        others.pop("kv_hints", None)  # vLLM 0.29 has none.
        try:
            queue = await super().add_request(request_id, prompt, params, **{**others, **own})
            try:
                await call.placed()
            except BaseException:
                await self.abort(queue.request_id, internal=True)
                raise
        except NotServed as error:
            _note(ApiError.of(error.loss))
            raise to_vllm_error(error.loss) from error
        except Exception as error:
            _note(as_api_error(error))
            raise
        finally:
            self.core.forget(call)
        return queue

    async def _add_request(self, request: EngineCoreRequest, *others: Any) -> None:
        # With more tokens, vLLM's model runner for GPUs raises, and its engine ends; vLLM bounds the number alone
        words = getattr(request.sampling_params, "bad_words_token_ids", None) or ()
        if (tokens := sum(map(len, words))) > (most := envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS):
            raise VLLMValidationError(f"bad_words have {tokens} tokens, and the limit is {most}", parameter="bad_words")
        await super()._add_request(request, *others)

    def lose(self, name: str, loss: Loss) -> None:
        """End a request, which replicas have taken and cannot continue, by an error of that text and status.

        vLLM's own end of a request that its engine fails is a 500 without a reason.
        """
        state = self.output_processor.request_states.get(name)
        if state is None or state.queue is None:
            return
        state.queue.put(to_vllm_error(loss))
        if state.parent_req is not None:  # vLLM ends the other choices of an answer only if its client has left.
            others = state.parent_req.child_requests - {name}
            self._ending.start(self.abort(others, internal=True))

    @cached_property
    def _ending(self) -> Tasks:
        return Tasks()

    def _check_prompt(self, prompt: Any) -> None:
        tokens = prompt.get("prompt_token_ids", ()) if isinstance(prompt, dict) else ()
        limit = self.max_prompt_tokens
        if limit is not None and len(tokens) > limit:
            reason = f"the prompt has {len(tokens)} tokens, and the limit is {limit}"
            raise VLLMValidationError(reason, parameter="prompt")


def _note(error: ApiError) -> None:
    """Note the error of a request in its call: not every stream of vLLM's application shows it."""
    if (api_call := CURRENT.get()) is not None:
        api_call.failure = error


def as_api_error(error: Exception) -> ApiError:
    """An error of vLLM's application, as its clients see it."""
    shown = create_error_response(error).error
    if shown.code == HTTPStatus.SERVICE_UNAVAILABLE:
        return ApiError.of(Loss(LossKind.UNAVAILABLE, shown.message))
    return ApiError(shown.code, shown.message, shown.param)


def to_vllm_error(loss: Loss) -> VLLMError:
    """The error that vLLM's application answers with a status of its own: 400, 503 or 500."""
    return VLLMClientError(loss.text) if loss.kind is LossKind.INVALID else RequestLost(ApiError.of(loss))
