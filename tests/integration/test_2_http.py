"""The HTTP surface of the running application. `test_7_differential` compares answers with those of vLLM's server."""

from tests.integration.application import Application, prompt, request


async def test_models_version_and_health(application: Application) -> None:
    async with application.client() as client:
        model, *_ = (await client.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mell-tiny", 4096)
        assert (await client.http.get("/version")).json()["vllm"].startswith("0.32")
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.http.get("/live")).status_code == 200


async def test_request_id_is_returned_once(application: Application) -> None:
    async with application.client() as client:
        body, headers = request(prompt(5, "id"), 2), {"X-Request-Id": "mine"}
        response = await client.http.post("/v1/completions", json=body, headers=headers)
        assert response.headers.get_list("x-request-id") == ["mine"]
