"""The routes over a fresh service."""

import pytest

from tests.app.ingress.fakes import Api, make_api


@pytest.fixture
async def api() -> Api:
    return make_api()
