"""The differences from vLLM's server that a frontend of Mell has on purpose. Everything else is a fault."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.ingress.openai.requests.schema import ChatRequest, CompletionRequest
from tests.differential.bodies import CHATS, COMPLETIONS
from tests.differential.cases import Case, Course
from tests.differential.comparison import Difference


@dataclass(frozen=True)
class Departures:
    """A frontend's differences from vLLM's server.

    `answers` tells the cases that it can answer. `members` are paths of members that only one of the two has, or that
    differ, with the reason. `odd` has vLLM's status, Mell's, and the reason, by the name of an odd case.
    """

    answers: Callable[[Case], bool] = lambda case: True
    members: Mapping[str, str] = field(default_factory=dict)
    odd: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)

    def remaining(self, differences: list[Difference]) -> list[Difference]:
        """The differences that are faults."""
        return [found for found in differences if not any(_covers(path, found.path) for path in self.members)]


def _covers(path: str, found: str) -> bool:
    return found == path or found.startswith((f"{path}.", f"{path}["))


def _answered_by_mell(case: Case) -> bool:
    if case.forced or case.course not in (Course.STEPS, Course.ODD) or case.path not in (COMPLETIONS, CHATS):
        return False
    fields = (CompletionRequest if case.path == COMPLETIONS else ChatRequest).model_fields
    known = case.asked.keys() <= fields.keys() | {"made_up"}
    known &= "continuous_usage_stats" not in str(case.asked.get("stream_options"))
    scored_prompt = case.asked.get("echo") and case.asked.get("logprobs") is not None
    return known and (case.course is Course.ODD or not (scored_prompt or "tools" in case.asked))


_UNKNOWN = "Mell refuses what it does not know; vLLM ignores it"
_CONTENT = "OpenAI wants content; vLLM makes it empty"

MELL = Departures(
    _answered_by_mell,
    {
        "error": "texts and codes of errors are each server's own",
        "service_tier": "OpenAI's own; vLLM has null",
        "system_fingerprint": "optional in OpenAI's API; vLLM's is of its version and settings",
        "metrics": "vLLM's own, for a setting",
        "kv_transfer_params": "vLLM's own, for disaggregated prefill",
        "ec_transfer_params": "vLLM's own, for disaggregated encoders",
        "prompt_text": "vLLM's own, for return_token_ids",
        "prompt_token_ids": "vLLM's own, for return_token_ids",
        "prompt_logprobs": "vLLM's own, for prompt_logprobs",
        "usage.prompt_tokens_details": "optional in OpenAI's API; vLLM has null unless a setting is made",
        "usage.completion_tokens_details": "optional in OpenAI's API; vLLM has null",
        "choices[].stop_reason": "vLLM's own: which stop string or token it was",
        "choices[].token_ids": "vLLM's own, for return_token_ids",
        "choices[].prompt_token_ids": "vLLM's own, for return_token_ids",
        "choices[].prompt_logprobs": "vLLM's own, for prompt_logprobs",
        "choices[].routed_experts": "vLLM's own, for mixtures of experts",
        "choices[].message.annotations": "null in vLLM",
        "choices[].message.audio": "null in vLLM",
        "choices[].message.function_call": "null in vLLM",
        "choices[].message.tool_calls": "empty in vLLM without tools",
        "choices[].message.reasoning": "null in vLLM without a reasoning parser",
        "choices[].message.refusal": "OpenAI's own",
        "choices[].logprobs.refusal": "OpenAI's, which vLLM leaves out",
    },
    {
        "several greedy choices": (400, 200, "OpenAI allows it, and they are equal; vLLM refuses"),
        "n None": (400, 200, "OpenAI allows null; vLLM does so in chats only"),
        "logit_bias {'5': 200}": (200, 400, "OpenAI allows -100 to 100; vLLM makes it 100"),
        "logprobs 6": (200, 400, "OpenAI allows 5; vLLM has a setting, 20 unless made"),
        "made_up 1": (200, 400, _UNKNOWN),
        "an unknown member of a chat": (200, 400, _UNKNOWN),
        "best_of above n": (200, 400, "vLLM has no best_of, and ignores it"),
        "a bad bias in a stream": (200, 400, "vLLM finds it in the engine, and sends an event"),
        "a regex that is none, streamed": (200, 400, "vLLM finds it in the engine, and sends an event"),
        "echo with logprobs": (200, 400, "not supported: Mell has no logprobs of prompts"),
        "echo with logprobs, streamed": (200, 400, "not supported: Mell has no logprobs of prompts"),
        "logprobs of the prompt alone": (200, 400, "not supported: Mell has no logprobs of prompts"),
        "that, echoed": (200, 200, "vLLM's answer begins with the prompt, once more"),
        "a prompt that ends within a character": (200, 200, "vLLM's answer begins with the prompt, once more"),
        "a prompt that leaves too little": (200, 400, "vLLM shortens the answer, unless it is too far off"),
        "two lengths": (200, 400, "vLLM takes max_completion_tokens; Mell has the client say which it means"),
        "messages [{'role': 'user'}]": (200, 400, _CONTENT),
        "messages [{'role': 'assistant', 'content': None}]": (200, 400, _CONTENT),
        "messages [{'role': 'user', 'content': []}]": (200, 400, _CONTENT),
        "messages [{'role': 'robot', 'content': 'hello'}]": (200, 400, "vLLM leaves roles to the template"),
    },
)
"""The frontend of Mell's own."""

_EARLIER = "refused before vLLM reads it, with a type and a code of Mell's"

VLLM = Departures(
    odd={
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
)
"""vLLM's own application, behind the layers that admit and bound requests."""
