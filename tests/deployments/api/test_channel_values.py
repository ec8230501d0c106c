"""All that the methods of channels may take and return travels, by their annotations."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api.protocols import (
    CHANNEL_METHODS,
    CONTROL_METHODS,
    DISPATCH_METHODS,
    PEER_METHODS,
    ChannelApi,
    ControlApi,
    DispatchApi,
    PeerApi,
)
from deployments.channels.wire import Methods, _encodable, encode_answer, encode_call

APIS: Sequence[tuple[type, Methods]] = (
    (ChannelApi, CHANNEL_METHODS),
    (ControlApi, CONTROL_METHODS),
    (DispatchApi, DISPATCH_METHODS),
    (PeerApi, PEER_METHODS),
)
CALLS = [(api, name, methods) for api, methods in APIS for name in methods]


def _lists(kind: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.from_type(*get_args(kind)), max_size=3)


@pytest.fixture(scope="module", autouse=True)
def values_that_travel() -> Iterator[None]:
    """MessagePack has numbers of 64 bits, and bytes are no sequence of numbers there. NaN is not like itself."""
    st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
    st.register_type_strategy(float, st.floats(allow_nan=False))
    st.register_type_strategy(Sequence, _lists)
    yield
    st.register_type_strategy(int, st.integers())
    st.register_type_strategy(float, st.floats())


unhurried = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("api", "name", "methods"), CALLS, ids=[f"{api.__name__}.{name}" for api, name, _ in CALLS])
@unhurried
@given(data=st.data())
def test_arguments_and_results_travel(api: type, name: str, methods: Methods, data: st.DataObject) -> None:
    function = getattr(api, name)
    assert inspect.iscoroutinefunction(function)
    hints = get_type_hints(function)
    result = data.draw(st.from_type(hints.pop("return")))
    arguments = tuple(data.draw(st.from_type(hint)) for hint in hints.values())
    _, called, sent = msgspec.msgpack.decode(encode_call(0, name, arguments)[4:], type=tuple[int, str, msgspec.Raw])
    assert called == name
    assert _same(methods[name].arguments.decode(sent), arguments)
    ((_, _, answer, failure),) = msgspec.msgpack.decode(
        encode_answer(7, result)[4:], type=tuple[tuple[str, int, msgspec.Raw, Any]]
    )
    assert failure is None and _same(methods[name].result.decode(answer), result)


_ordered = msgspec.msgpack.Encoder(enc_hook=_encodable, order="deterministic")


def _same(found: object, sent: object) -> bool:
    """Equal, where sequences and mappings may be of other types."""
    return found == sent or _ordered.encode(found) == _ordered.encode(sent)
