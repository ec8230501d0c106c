"""The tiny model's tokenizer, made once, and the routes over a fresh service."""

import pytest
from tokenizers import Tokenizer

from app.ingress.completions import Model
from app.tinymodel import VOCAB_SIZE, _make_tokenizer
from tests.app.ingress.fakes import MAX_CONTEXT, Api, make_api


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    _make_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    return Model("tiny", tokenizer, VOCAB_SIZE, MAX_CONTEXT, created=1)


@pytest.fixture
async def api(model: Model) -> Api:
    return make_api(model)
