"""The model, and text to tokens and back, as vLLM's server has them."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from app.ingress.openai.model import Model
from tests.app.ingress.fakes import MAX_CONTEXT, MESSAGES, PROMPT, Api, make_api

TEXT = "Blocks move \U0001f600 between replicas"


async def test_a_model_is_found_by_its_name(api: Api) -> None:
    (listed,) = (await api.get("/v1/models")).json()["data"]
    assert (await api.get("/v1/models/tiny")).json() == listed


async def test_a_name_may_have_slashes(model: Model) -> None:
    api = make_api(replace(model, id="maker/tiny"))
    assert (await api.get("/v1/models/maker/tiny")).json()["id"] == "maker/tiny"


@pytest.mark.parametrize("name", ["other", "tiny/", "tiny/x", "%00", "maker/tiny"])
async def test_another_model_is_not_found(api: Api, name: str) -> None:
    response = await api.get(f"/v1/models/{name}")
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_tokens_of_a_text_are_those_of_its_completion(api: Api) -> None:
    told = (await api.post("/tokenize", json={"prompt": TEXT, "model": "tiny"})).json()
    ids = api.backend.model.tokenizer.encode(TEXT).ids
    assert told == {"count": len(ids), "max_model_len": MAX_CONTEXT, "tokens": ids, "token_strs": None}


async def test_tokens_of_a_chat_are_those_of_its_completion(api: Api) -> None:
    told = (await api.post("/tokenize", json={"messages": MESSAGES})).json()
    used = (await api.chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert told["count"] == len(told["tokens"]) == used


async def test_a_chat_may_be_told_without_what_an_answer_begins_with(api: Api) -> None:
    told = (await api.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
    text: str = api.backend.model.tokenizer.decode(told["tokens"])
    assert text == "system: Be brief.\nuser: Where do blocks move?\n"


async def test_tokens_have_names(api: Api) -> None:
    told = (await api.post("/tokenize", json={"prompt": "a</s>", "return_token_strs": True})).json()
    assert told["token_strs"] == [api.backend.model.tokenizer.id_to_token(t) for t in told["tokens"]]
    assert told["token_strs"][-1] == "</s>"


@pytest.fixture
def beginning(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that puts a token before every text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return copy


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": "x", "add_special_tokens": False}, False),
        ({"messages": MESSAGES}, False),
        ({"messages": MESSAGES, "add_special_tokens": True}, True),
    ],
    ids=["a text", "a text as it is", "a chat", "a chat with more"],
)
async def test_special_tokens_are_put_before_texts_and_written_by_templates(
    model: Model, beginning: Tokenizer, body: Any, begins: bool
) -> None:
    api = make_api(replace(model, tokenizer=beginning))
    tokens = (await api.post("/tokenize", json=body)).json()["tokens"]
    assert (tokens[0] == 1) is begins
    if "messages" in body and not begins:
        assert (await api.chat(max_tokens=1)).json()["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("text", [TEXT, "", " ", "a</s>b", "\u0000"])
async def test_tokens_are_the_text_that_they_are_of(api: Api, text: str) -> None:
    tokens = (await api.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert (await api.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


async def test_tokens_that_are_no_text_are_told_as_well_as_may_be(api: Api) -> None:
    half = api.backend.model.tokenizer.encode("ü").ids[:1]
    assert (await api.post("/detokenize", json={"tokens": [*PROMPT, *half]})).json()["prompt"].endswith("\ufffd")
