"""Grammars of vLLM's own backends in a moved request: the rest of the output is that of the unmoved one.

An engine here is vLLM's `StructuredOutputManager` with Mell's changes, and a model that draws. The moved request is
encoded and edited as in a replica.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from app.settings import CPU_ENGINE
from app.tinymodel import ensure_tiny_model
from deployments.engine.arguments import engine_config
from migration.kv import grammars
from migration.kv.history import split
from migration.protocol.continuing import continued, rehearsing, to_spec
from migration.protocol.core_messages import Frames, decode_request
from migration.protocol.request import IngressId, RequestSpec
from policies.model import RequestId
from tests.migration.kv.formats import BESIDE, EOS, FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens")
"""vLLM still sets it."""

PROMPT = [5, 6, 7, 8]
MOST = 45


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return engine_config(str(ensure_tiny_model()), dict(CPU_ENGINE))


@pytest.fixture(autouse=True)
def by_request() -> Iterator[None]:
    """Mell's changes of vLLM, and vLLM as it was."""
    vllms = StructuredOutputManager.grammar_init, StructuredOutputManager._create_grammar
    grammars.compile_by_request()
    yield
    StructuredOutputManager.grammar_init, StructuredOutputManager._create_grammar = vllms


class Reasoner:
    """A reasoning parser: reasoning ends with the token `END`."""

    END = 511

    def __init__(self, tokenizer: Any) -> None: ...

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        return self.END in tokens

    def is_reasoning_end_streaming(self, tokens: Sequence[int], new: Sequence[int]) -> bool:
        return self.END in new


@dataclass
class Output:
    """What a request has generated, and its end."""

    tokens: list[int]
    status: RequestStatus | None = None
    masks: list[bytes] | None = None


class Engine:
    """One replica's grammars, and a model that draws a token by the prompt and the number of the token."""

    def __init__(self, config: VllmConfig, reasons: bool = False) -> None:
        self._config = config
        self.manager = StructuredOutputManager(config)
        if reasons:
            self.manager.reasoner_cls = Reasoner

    def spec(self, backend: str, form: Mapping[str, Any], beside: Mapping[str, Any]) -> RequestSpec:
        """The request, as vLLM's frontend and an ingress make it with a configured backend."""
        sampling = SamplingParams(max_tokens=MOST, structured_outputs=StructuredOutputsParams(**form), **beside)
        tokenizer, model = self.manager.tokenizer, self._config.model_config
        sampling.update_from_generation_config({"eos_token_id": EOS}, EOS)
        sampling.update_from_tokenizer(tokenizer)
        sampling.verify(model, None, StructuredOutputsConfig(backend=backend), tokenizer)
        made = EngineCoreRequest("r", list(PROMPT), None, sampling, None, 0.0, None, None, None)
        frames: Frames = tuple(bytes(frame) for frame in MsgpackEncoder().encode(made))
        return to_spec(decode_request(frames), frames, RequestId("r"), "", IngressId("i"))

    def add(self, frames: Frames) -> Request:
        """A request whose grammar is ready. Raises what its compilation raises."""
        decoded = MsgpackDecoder(EngineCoreRequest).decode([bytearray(frame) for frame in frames])
        request = Request.from_engine_core_request(decoded, None)
        self.manager.grammar_init(request)
        assert request.structured_output_request is not None
        request.structured_output_request._grammar.result(60)
        outputs = (request.kv_transfer_params or {}).get("mell_output", 0)
        split(request, outputs, SimpleNamespace(prefill_token_ids=None))
        return request

    def run(self, spec: RequestSpec, seed: int, outputs: tuple[int, ...] = (), drafts: bool = False) -> Output:
        """Continue a request to its end. One that `drafts` accepts two tokens in some steps."""
        request = self.add(continued(spec, "name", "key", outputs))
        output = Output(list(outputs), masks=[])
        draw = random.Random(f"{seed}")
        while output.status is None:
            taken = [self._token(request, seed, output)]
            if drafts and draw.random() < 0.4 and not self._stops(request, taken[0]):
                request_tokens = list(request.output_token_ids)
                more = self._drafted(request, seed, output, taken[0])
                assert list(request.output_token_ids) == request_tokens
                taken += more
            self._take(request, taken, output)
        return output

    def _take(self, request: Request, taken: list[int], output: Output) -> None:
        """The end of a step, as in vLLM's scheduler."""
        stopped, new = False, []
        for token in taken:
            request.append_output_token_ids(token)
            new.append(token)
            if stopped := check_stop(request, 4096):
                break
        accepted = self.manager.accept_tokens(request, new)
        output.tokens += new
        if not accepted:
            output.status = RequestStatus.FINISHED_ERROR
        elif stopped:
            output.status = request.status

    def _stops(self, request: Request, token: int) -> bool:
        sampling = request.sampling_params
        return token in (sampling.eos_token_id, *(sampling.stop_token_ids or ()))

    def _drafted(self, request: Request, seed: int, output: Output, first: int) -> list[int]:
        """A second token that vLLM would accept with the first one, if there is one."""
        valid = [
            token
            for token in random.Random(f"{seed} {len(output.tokens) + 1}").sample(range(3, 511), 40)
            if self.manager.validate_tokens(request, [first, token]) == [first, token]
        ]
        return valid[:1]

    def _token(self, request: Request, seed: int, output: Output) -> int:
        sampling = request.sampling_params
        mask = torch.from_numpy(self.manager.grammar_bitmask({"name": request}, ["name"], {}).copy())[0]
        assert output.masks is not None
        output.masks.append(mask.numpy().tobytes())
        bits = (mask.unsqueeze(1) >> torch.arange(32)) & 1
        allowed = [token for token, bit in enumerate(bits.flatten().tolist()) if bit]
        draw = random.Random(f"{seed} {request.num_output_tokens}")
        logits = [draw.random() for _ in range(512)]
        for token, bias in (sampling.logit_bias or {}).items():
            logits[token] += bias
        if sampling.allowed_token_ids is not None:
            allowed = [token for token in allowed if token in sampling.allowed_token_ids]
        banned = {words[0] for words in sampling.bad_words_token_ids or () if len(words) == 1}
        allowed = [token for token in allowed if token not in banned]
        if request.num_output_tokens < sampling.min_tokens:
            allowed = [token for token in allowed if token not in sampling.all_stop_token_ids] or allowed
        # The likeliest of tokens that all have the probability 0 is the first one.
        return max(allowed, key=logits.__getitem__) if allowed else 0


@pytest.mark.parametrize("reasons", [False, True], ids=["plain", "reasoning"])
@pytest.mark.parametrize(
    ("backend", "form"), [(backend, form) for backend, forms in FORMATS.items() for form in forms], ids=str
)
def test_a_moved_request_has_the_output_of_the_unmoved_one(
    config: VllmConfig, backend: str, form: str, reasons: bool
) -> None:
    first, second = Engine(config, reasons), Engine(config, reasons)
    compared = set()
    for beside, params in BESIDE.items():
        spec = first.spec(backend, FORMATS[backend][form], params)
        for seed in range(2):
            wanted = first.run(spec, seed)
            for cut in sorted(random.Random(f"{beside}{seed}").sample(range(1, MOST), 6)):
                if cut >= len(wanted.tokens):
                    break
                moved = second.run(spec, seed, tuple(wanted.tokens[:cut]))
                assert moved.tokens == wanted.tokens, (beside, seed, cut)
                assert moved.status == wanted.status and moved.masks == wanted.masks[cut:], (beside, seed, cut)
                compared.add(beside)
    print(backend, form, len(compared), set(BESIDE)-compared)
