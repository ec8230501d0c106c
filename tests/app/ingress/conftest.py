"""The tiny model's tokenizer, made once per session, and the routes over a fresh service."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from app.ingress.openai.model import Model
from app.ingress.openai.requests.template import ChatTemplate
from app.tinymodel import VOCAB_SIZE, _make_tokenizer
from tests.app.ingress.fakes import MAX_CONTEXT, Api, PlainRequests, make_api


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer as loaded by transformers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    _make_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(pretrained: Any) -> Tokenizer:
    backend: Tokenizer = pretrained.backend_tokenizer
    return backend


@pytest.fixture(scope="session")
def model(pretrained: Any, tokenizer: Tokenizer) -> Model:
    return Model(
        "tiny",
        tokenizer,
        VOCAB_SIZE,
        MAX_CONTEXT,
        created=1,
        requests=PlainRequests(),
        chat=ChatTemplate.of(pretrained),
    )


@pytest.fixture
async def api(model: Model) -> Api:
    return make_api(model)
