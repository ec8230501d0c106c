"""vLLM's lines on the terminal: only errors."""

import io
import logging

from deployments.replica.deployment import errors_only


def test_a_handler_for_errors_is_like_the_other_one_and_leaves_it_alone() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("- %(message)s"))
    errors = errors_only(handler)
    for level in (logging.WARNING, logging.ERROR):
        for each in (handler, errors):
            record = logging.makeLogRecord({"levelno": level, "msg": f"{level}"})
            if record.levelno >= each.level:
                each.handle(record)
    assert stream.getvalue() == "- 30\n- 40\n- 40\n"
