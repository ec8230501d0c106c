"""Grammars of vLLM's own backends in a moved request: the rest of the output is that of the unmoved one.

An engine here is vLLM's `StructuredOutputManager` with Mell's changes, and a model that draws. The moved request is
encoded and edited as in a replica.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.structured_output import StructuredOutputManager

from app.settings import CPU_ENGINE
from app.tinymodel import ensure_tiny_model
from deployments.engine.arguments import engine_config
from migration.kv import grammars
from migration.kv.history import split
from migration.protocol.continuing import continued, plain_spec, rehearsing
from migration.protocol.core_messages import Frames, decode_request, encode_request
from migration.protocol.request import RequestSpec
from tests.migration.kv.formats import BESIDE, CALL, FORMATS, sampling_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:max_rollback_tokens")]
"""vLLM still sets it."""

PROMPT = (5, 6, 7, 8)
MOST = 36


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
    """A reasoning parser: reasoning ends with any of the last tokens."""

    def __init__(self, tokenizer: Any) -> None: ...

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        return max(tokens) >= 480

    def is_reasoning_end_streaming(self, tokens: Sequence[int], new: Sequence[int]) -> bool:
        return max(new) >= 480


def decoded(frames: Frames) -> EngineCoreRequest:
    """A request as an engine core reads it."""
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode([bytearray(frame) for frame in frames])
    return request


@dataclass
class Output:
    """What a request has generated, its end, and the tokens that were allowed each time."""

    tokens: list[int]
    status: RequestStatus | None = None
    allowed: list[bytes] = field(default_factory=list)


class Engine:
    """One replica's grammars, and a model that draws by a seed and the number of the token."""

    def __init__(self, config: VllmConfig, reasons: bool = False) -> None:
        self._config = config
        self.manager = StructuredOutputManager(config)
        if reasons:
            self.manager.reasoner_cls = Reasoner

    def spec(self, backend: str, form: Mapping[str, Any], max_tokens: int = MOST, **beside: Any) -> RequestSpec:
        """The request, as vLLM's frontend and an ingress make it with a configured backend."""
        sampling = sampling_of(self._config, self.manager.tokenizer, backend, form, max_tokens, **beside)
        return plain_spec("r", PROMPT, max_tokens, **sampling)

    def add(self, frames: Frames) -> Request:
        """A request whose grammar is ready. Raises what its compilation raises."""
        request = Request.from_engine_core_request(decoded(frames), None)
        self.manager.grammar_init(request)
        assert request.structured_output_request is not None
        request.structured_output_request._grammar.result(60)
        return request

    def run(self, spec: RequestSpec, seed: int, outputs: Sequence[int] = ()) -> Output:
        """Continue a request to its end."""
        request = self.add(continued(spec, "name", "key", tuple(outputs)))
        split(request, len(outputs), SimpleNamespace(prefill_token_ids=None))
        output = Output(list(outputs))
        while output.status is None:
            self._step(request, seed, output)
        return output

    def _step(self, request: Request, seed: int, output: Output) -> None:
        token = self._draw(request, seed, output)
        output.tokens.append(token)
        request.append_output_token_ids(token)
        stopped = check_stop(request, 4096)
        if not self.manager.accept_tokens(request, [token]):
            output.status = RequestStatus.FINISHED_ERROR
        elif stopped:
            output.status = request.status

    def _draw(self, request: Request, seed: int, output: Output) -> int:
        sampling, count = request.sampling_params, request.num_output_tokens
        (mask,) = self.manager.grammar_bitmask({"name": request}, ["name"], {})
        output.allowed.append(mask.tobytes())
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        logits = np.random.default_rng([seed, count]).random(allowed.size)
        for token, bias in (sampling.logit_bias or {}).items():
            logits[token] += bias
        if sampling.allowed_token_ids is not None:
            allowed &= np.isin(np.arange(allowed.size), sampling.allowed_token_ids)
        allowed[[words[0] for words in sampling.bad_words_token_ids or () if len(words) == 1]] = False
        if count < sampling.min_tokens:
            stops = list(sampling.all_stop_token_ids)
            if allowed.sum() > allowed[stops].sum():
                allowed[stops] = False
        # The likeliest one of tokens that all have the probability 0 is the first.
        return int(np.where(allowed, logits, -np.inf).argmax())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "reasoning"])
def engines(config: VllmConfig, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Two replicas."""
    return Engine(config, request.param), Engine(config, request.param)


@pytest.mark.parametrize(
    ("backend", "form"), [(backend, form) for backend, forms in FORMATS.items() for form in forms], ids=str
)
def test_a_moved_request_has_the_output_of_the_unmoved_one(
    engines: tuple[Engine, Engine], backend: str, form: str
) -> None:
    here, there = engines
    for number, (beside, params) in enumerate(BESIDE.items()):
        spec = here.spec(backend, FORMATS[backend][form], **params)
        wanted = here.run(spec, number)
        count = len(wanted.tokens)
        for cut in {1, count // 2, count - 2} & set(range(1, count)):
            moved = there.run(spec, number, wanted.tokens[:cut])
            assert (moved.tokens, moved.status) == (wanted.tokens, wanted.status), (beside, cut)
            assert moved.allowed == wanted.allowed[cut:], (beside, cut)


SEVENS = {"json": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 9}}
"""A schema that xgrammar does not know all of, so that vLLM chooses guidance for it."""


def test_engines_agree_whatever_they_compiled_first(config: VllmConfig) -> None:
    engines = Engine(config), Engine(config)
    specs = [engines[0].spec("auto", form) for form in (SEVENS, FORMATS["xgrammar"]["choice"], {"json": CALL})]
    chosen = [decode_request(spec.body).sampling["structured_outputs"]["_backend"] for spec in specs]
    assert chosen == ["guidance", "xgrammar", "xgrammar"]
    first = {spec: engines[0].run(spec, 7) for spec in specs}
    for spec in reversed(specs):
        assert engines[1].run(spec, 7) == first[spec]
        moved = engines[1].run(spec, 7, first[spec].tokens[:3])
        assert (moved.tokens, moved.status) == (first[spec].tokens, first[spec].status)


def test_a_rehearsal_fails_as_the_moved_request_would(engines: tuple[Engine, Engine]) -> None:
    here, there = engines
    form = FORMATS["xgrammar"]["regex"]
    spec = here.spec("xgrammar", form, ignore_eos=True)
    outputs = here.run(spec, 3).tokens
    tried = there.add(rehearsing(spec, "try", tuple(outputs)))
    assert tried.num_tokens == 1 and tried.max_tokens == 1, "the context is not computed"
    (mask,) = there.manager.grammar_bitmask({"try": tried}, ["try"], {})
    assert (
        mask.tobytes() == there.run(here.spec("xgrammar", form, ignore_eos=True, max_tokens=99), 3, outputs).allowed[0]
    )
    with pytest.raises(ValueError, match="does not follow"):
        there.add(rehearsing(spec, "try", (*range(480, 512), 9, 9)))


class Wide:
    """A grammar with bitmasks of three members, of which it allows the tokens of the first and the last."""

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        assert bitmask.shape == (1, 3)
        bitmask[index] = torch.tensor([-1, 0, -1])


@pytest.mark.parametrize(
    ("width", "filled"), [(2, [-1, 0]), (4, [-1, 0, -1, 0])], ids=["more than the model", "fewer than the model"]
)
def test_a_backend_may_count_other_tokens_than_the_model(width: int, filled: list[int]) -> None:
    bitmask = torch.full((2, width), 5, dtype=torch.int32)
    grammars.FittedGrammar(cast(Any, Wide()), 3).fill_bitmask(bitmask, 1)
    assert bitmask.tolist() == [[5] * width, filled]


class Keeping:
    """A backend that keeps what it compiles in itself, as guidance does, while another thread compiles."""

    both = threading.Barrier(2)

    def compile_grammar(self, kind: Any, text: str, stop_token_ids: Any) -> str:
        self.text = text
        self.both.wait(10)
        return self.text


def test_two_threads_compile_each_their_own_grammar(engines: tuple[Engine, Engine]) -> None:
    backends = grammars.GrammarBackends(engines[0]._config, None)
    backends._made["guidance"] = cast(Any, Keeping()), backends._width
    texts = ["a", "b"]
    with ThreadPoolExecutor(2) as threads:
        specs = [engines[0].spec("guidance", {"regex": text}) for text in texts]
        requests = [Request.from_engine_core_request(decoded(continued(spec, "n", "k", ())), None) for spec in specs]
        assert list(threads.map(backends.compile, requests)) == texts


def test_a_grammar_that_cannot_be_compiled_fails_only_its_own_request(engines: tuple[Engine, Engine]) -> None:
    here, _ = engines
    spec = here.spec("xgrammar", {"json": CALL})
    request = decode_request(spec.body)
    structured = {**request.sampling["structured_outputs"], "_backend": "none"}
    broken = msgspec.structs.replace(request, sampling_params={**request.sampling, "structured_outputs": structured})
    with pytest.raises(ValueError, match="no backend 'none'"):
        here.add(continued(replace(spec, body=encode_request(broken)), "name", "key", ()))
    assert here.run(spec, 1).tokens
