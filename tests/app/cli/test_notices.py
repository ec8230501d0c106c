"""Notices as the clouds write them."""

import json
from datetime import datetime

import pytest

from app.cli.notices import GCE_S, Notice, parse_azure, parse_ec2, parse_file, parse_gce

AT = datetime.fromisoformat("2026-11-28T12:00:00+00:00").timestamp()


def azure(**event: object) -> str:
    preempt = {"EventId": "e", "EventType": "Preempt", "Resources": ["gpu_3"], "NotBefore": ""} | event
    other = {"EventType": "Reboot", "Resources": ["gpu_3"], "NotBefore": ""}
    return json.dumps({"DocumentIncarnation": 1, "Events": [other, preempt]})


@pytest.mark.parametrize(
    ("found", "notice"),
    [
        (parse_ec2('{"action": "terminate", "time": "2026-11-28T12:00:00Z"}'), Notice(AT)),
        (parse_ec2('{"action": "hibernate"}'), Notice(None)),
        (parse_gce("TRUE\n", AT), Notice(AT + GCE_S)),
        (parse_gce("FALSE", AT), None),
        (parse_azure(azure(NotBefore="Sat, 28 Nov 2026 12:00:00 GMT"), "gpu_3"), Notice(AT)),
        (parse_azure(azure(), "gpu_3"), Notice(None)),
        (parse_azure(azure(), "gpu_4"), None),
        (parse_azure(azure(EventType="Freeze"), "gpu_3"), None),
        (parse_azure('{"DocumentIncarnation": 1, "Events": []}', "gpu_3"), None),
        (parse_file("2026-11-28T12:00:00\n"), Notice(AT)),
        (parse_file("2026-11-28T13:00:00+01:00"), Notice(AT)),
        (parse_file(""), Notice(None)),
        (parse_file("soon"), Notice(None)),
    ],
)
def test_a_notice_is_read(found: Notice | None, notice: Notice | None) -> None:
    assert found == notice


@pytest.mark.parametrize("text", ["", "<html>", "[]", "null", '{"Events": 1}', '{"Events": [1]}'])
def test_another_answer_is_no_notice(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_azure(text, "m")
    with pytest.raises(ValueError, match="neither TRUE nor FALSE"):
        parse_gce(text, AT)
    if not text.startswith("{"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_ec2(text)


def test_the_time_that_is_left_is_one_that_an_order_takes() -> None:
    notice = Notice(AT)
    assert [notice.left_s(AT - before) for before in (-5, 0, 119.96, 1e6)] == [0, 0, 120, 86_400]
    assert Notice(None).left_s(AT) is None
