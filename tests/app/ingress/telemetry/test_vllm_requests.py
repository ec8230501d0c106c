"""vLLM's metrics of whole requests, fed with the outputs of one engine or of several."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackEncoder

from app.ingress.openai.core_requests import VllmRequests
from app.ingress.openai.sampling import Sampling, Structured
from app.ingress.telemetry.vllm_requests import VllmRequestMetrics
from app.tinymodel import ensure_tiny_model
from deployments.engine.arguments import frontend_config
from deployments.metrics.vllm import of_requests
from migration.protocol.continuing import plain_spec, to_spec
from migration.protocol.core_messages import decode_request
from migration.protocol.reading import Output
from migration.protocol.request import IngressId, Trait
from policies.model import RequestId


@pytest.fixture(scope="module")
def config() -> Any:
    """Arguments of devices do not reach it."""
    return frontend_config(
        str(ensure_tiny_model()), {"max_model_len": 512, "kv_cache_dtype": "fp8", "quantization": "awq"}
    )


@pytest.fixture
def metrics(config: Any) -> VllmRequestMetrics:
    return VllmRequestMetrics(config)


def rest(queued: float, scheduled: float, prefill: PrefillStats, preemptions: int = 0) -> bytes:
    """The rest of a first token; times in seconds before it."""
    times = [(EngineCoreEventType.QUEUED, queued), (EngineCoreEventType.SCHEDULED, scheduled)]
    events = [EngineCoreEvent(kind, -ago) for kind, ago in times]
    events += [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 0.0)] * preemptions
    return bytes(MsgpackEncoder().encode(EngineCoreOutput("", [], events=events, prefill_stats=prefill))[0])


def samples(metrics: VllmRequestMetrics) -> dict[str, float]:
    """The samples of the exposed metrics, without labels but a finish reason."""
    exposed = {family.name for family in metrics.expose("i")}
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples if family.name in exposed else ():
            reason = sample.labels.get("finished_reason")
            found[sample.name + (f":{reason}" if reason else "")] = sample.value
    return found


HIT = PrefillStats(num_prompt_tokens=8, num_computed_tokens=2, num_cached_tokens=6, num_local_cached_tokens=6)
LATER = PrefillStats(num_prompt_tokens=10, num_computed_tokens=10)
FIRST, SECOND = rest(5.0, 2.0, HIT), rest(1.0, 0.5, LATER, preemptions=1)


def test_a_request_counts_once_on_however_many_engines(metrics: VllmRequestMetrics) -> None:
    record = metrics.begin(plain_spec("r", (5,) * 8, 20))
    record.took(Output(0, (1,), ((0, FIRST),)))
    record.took(Output(1, (2,)))
    record.took(Output(2, (3,), ((2, SECOND),)))
    record.took(Output(3, (), (), "length"))
    seen = samples(metrics)
    assert seen["vllm:request_success_total:length"] == seen["vllm:e2e_request_latency_seconds_count"] == 1
    assert seen["vllm:time_to_first_token_seconds_count"] == 1 and seen["vllm:inter_token_latency_seconds_count"] == 2
    assert seen["vllm:request_prompt_tokens_sum"] == 8 and seen["vllm:request_generation_tokens_sum"] == 3
    assert seen["vllm:request_params_max_tokens_sum"] == 20 and seen["vllm:request_prefill_kv_computed_tokens_sum"] == 2
    assert seen["vllm:request_queue_time_seconds_sum"] == pytest.approx(3.0, abs=0.01)
    assert seen["vllm:request_prefill_time_seconds_sum"] == pytest.approx(2.0, abs=0.1)
    assert seen["vllm:request_num_preemptions_sum"] == 1


def test_times_without_an_engines_events_begin_with_the_request(metrics: VllmRequestMetrics) -> None:
    record = metrics.begin(plain_spec("r", (5,), 20))
    record.took(Output(0, (1,), (), "length"))
    seen = samples(metrics)
    assert seen["vllm:request_queue_time_seconds_sum"] == 0
    assert 0 <= seen["vllm:request_prefill_time_seconds_sum"] < 5


def test_an_answer_with_a_stop_string_has_stopped(metrics: VllmRequestMetrics) -> None:
    record = metrics.begin(plain_spec("r", (5,), 20))
    record.took(Output(0, (1,), ((0, FIRST),)))
    record.stopped()
    record.took(Output(1, (2,), (), "length"))
    seen = samples(metrics)
    assert (seen["vllm:request_success_total:stop"], seen["vllm:request_success_total:length"]) == (1, 0)


@pytest.mark.parametrize("outputs", [[], [Output(0, (1,), ((0, FIRST),))]], ids=["before a token", "after it"])
def test_a_request_whose_client_leaves_has_no_end(metrics: VllmRequestMetrics, outputs: Sequence[Output]) -> None:
    record = metrics.begin(plain_spec("r", (5,), 20))
    for output in outputs:
        record.took(output)
    seen = samples(metrics)
    assert sum(value for name, value in seen.items() if name.startswith("vllm:request_success_total")) == 0
    assert seen["vllm:time_to_first_token_seconds_count"] == len(outputs)


def test_gaps_are_not_kept_for_ever_without_a_scrape(metrics: VllmRequestMetrics) -> None:
    record = metrics.begin(plain_spec("r", (5,), 9_000))
    for index in range(3_000):
        record.took(Output(index, (1,)))
    assert len(metrics.now().inter_token_latencies_iter) <= 1_000
    assert samples(metrics)["vllm:inter_token_latency_seconds_count"] == 2_999


def test_every_metric_of_vllm_is_of_requests_or_of_engines(metrics: VllmRequestMetrics) -> None:
    """No name in the table of those of requests is outdated."""
    from deployments.metrics.vllm import _OF_REQUESTS

    optional = {"vllm:corrupted_requests", "vllm:tool_call_parser_invocations", "vllm:watermark_requests"}
    names = {family.name for family in REGISTRY.collect() if family.name.startswith("vllm:")}
    assert names >= _OF_REQUESTS - optional
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens"} <= {
        name for name in names if not of_requests(name)
    }


# --- requests -----------------------------------------------------------------------------------------


def test_requests_are_completed_with_the_models_end(config: Any) -> None:
    frames = VllmRequests(config).make((5, 6), Sampling(9, temperature=0.0, priority=-2, logit_bias=((7, 1.5),)))
    request = decode_request(frames)
    assert (request.prompt_token_ids, request.priority) == ([5, 6], -2)
    assert abs(request.arrival_time - time.time()) < 60
    sampling = request.sampling
    assert (sampling["max_tokens"], sampling["_eos_token_id"]) == (9, 2)
    assert to_spec(frames, RequestId("r"), "", IngressId("")).max_tokens == 9


def test_grammars_are_given_to_a_compiler(config: Any) -> None:
    frames = VllmRequests(config).make((5,), Sampling(9, structured=Structured("choice", '["a", "b"]')))
    assert decode_request(frames).sampling["structured_outputs"]["_backend"]
    assert to_spec(frames, RequestId("r"), "", IngressId("")).traits == {Trait.STRUCTURED}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9, structured=Structured("regex", "(")),
        Sampling(9, structured=Structured("grammar", "no grammar")),
        Sampling(9, logprobs=21),
        Sampling(9, logit_bias=((1 << 20, 1.0),)),
    ],
    ids=["expression", "grammar", "logprobs", "vocabulary"],
)
def test_requests_that_no_engine_runs_are_refused(config: Any, sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"."):
        VllmRequests(config).make((5,), sampling)


def test_prompts_that_no_engine_takes_are_refused(config: Any) -> None:
    for prompt in ((), (5,) * 512, (1 << 20,)):
        with pytest.raises(ValueError, match=r"."):
            VllmRequests(config).make(prompt, Sampling(9))
