"""Calls that schemathesis makes of the OpenAPI document, right ones and wrong ones: none makes the server fail."""

from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from app.ingress.openai.description.openapi import document
from app.ingress.openai.description.operations import EVENTS, OPERATIONS, Operation
from app.ingress.openai.model import Model
from tests.app.ingress.fakes import Api, Backend, make_app, make_service
from tests.app.ingress.openai.conformance import check
from tests.deployments.scheduler.fakes import make_report
from tests.deployments.scheduler.test_scheduler import make_scheduler, running

pytestmark = pytest.mark.virtual_time

CONTEXT = 64
"""Short, since a call may ask for all that the context holds."""
NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
SCHEMA = schemathesis.openapi.from_dict(document())
BOUNDED = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
BODIED = [operation for operation in OPERATIONS if operation.body]
load_all_checks()


@pytest.fixture
async def api(model: Model) -> Api:
    """The routes over engines that take no time, and over a scheduler's own words of its state."""
    backend = Backend(make_service(step_s=0.0), replace(model, max_context=CONTEXT))
    scheduler = await make_scheduler(make_report("a"), make_report("b", requests=(running("r", "mine"),)))
    backend.state, backend.migrations = scheduler.core.state, scheduler.core.migrations  # type: ignore[method-assign]
    return Api(backend, make_app(backend))


async def checked(api: Api, operation: Operation, case: Case[Any]) -> int:
    """Make the call; its status."""
    sent: dict[str, Any] = case.as_transport_kwargs()
    assert not sent.pop("cookies", None)
    if "data" in sent:
        sent["content"] = sent.pop("data")
    response = await api.send(sent.pop("method"), sent.pop("url"), **sent)
    # What a stream holds is checked below: to schemathesis, OpenAPI 3.1's schema of it is one of each event.
    streamed = response.headers["content-type"].startswith(EVENTS)
    checks: Any = CHECKS.get_by_names([n for n in NAMES if not (streamed and n == "response_schema_conformance")])
    case.validate_response(response, checks=checks)
    check(operation, response)
    await api.backend.service.idle()
    return response.status_code


def bounds_of(operation: Operation, mode: GenerationMode) -> list[Case[Any]]:
    """Calls that try each limit and each type of the document in turn, with the operation's own method."""
    described = SCHEMA[operation.path][operation.method]
    config = SCHEMA.config.generation
    cases = SCHEMA.iter_coverage_cases(described, generation_modes=[mode], generation_config=config)
    return [case for case in cases if case.method == operation.method]


@BOUNDED
@given(data=st.data())
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.id)
async def test_what_is_described_is_served_or_refused(api: Api, operation: Operation, data: st.DataObject) -> None:
    case = data.draw(SCHEMA[operation.path][operation.method].as_strategy(GenerationMode.POSITIVE))
    await checked(api, operation, case)


@BOUNDED
@given(data=st.data())
@pytest.mark.parametrize("operation", BODIED, ids=lambda o: o.id)
async def test_what_is_not_described_is_refused(api: Api, operation: Operation, data: st.DataObject) -> None:
    case = data.draw(SCHEMA[operation.path][operation.method].as_strategy(GenerationMode.NEGATIVE))
    assert 400 <= await checked(api, operation, case) < 500


@pytest.mark.parametrize("operation", BODIED, ids=lambda o: o.id)
async def test_every_limit_can_be_reached(api: Api, operation: Operation) -> None:
    statuses = [await checked(api, operation, case) for case in bounds_of(operation, GenerationMode.POSITIVE)]
    assert operation.id == "migrate" or operation.answer.status in statuses


@pytest.mark.parametrize("operation", BODIED, ids=lambda o: o.id)
async def test_no_limit_can_be_passed(api: Api, operation: Operation) -> None:
    cases = bounds_of(operation, GenerationMode.NEGATIVE)
    assert len(cases) > 10
    for case in cases:
        assert 400 <= await checked(api, operation, case) < 500
