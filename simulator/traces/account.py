"""The account of a trace as lines to print, from its JSON document alone."""

from collections.abc import Iterator, Mapping
from typing import Any


def account_lines(account: Mapping[str, Any] | None) -> Iterator[str]:
    """The format, the columns and the unit of times, and a line for every kind of requests that was changed."""
    if account is None:
        return
    columns = f" ({', '.join(account['columns'])})" if account["columns"] else ""
    begins = "" if account["begins"] is None else f", the first at {account['begins']}"
    line = account["read_to_line"]
    rest = "" if line is None else f"; read to line {line:,}, which is after the part"
    yield f"read as {account['format']}{columns}, times in {account['time_unit']}{begins}{rest}"
    if account["unit_is_guess"]:
        yield (
            f"unit of times guessed from the format and the values: {account['time_unit']}; if it is wrong, name the "
            "unit in the column, as in timestamp_s or timestamp_ms, or correct the times with --time-scale"
        )
    for change in account["changes"]:
        yield (
            f"{change['what']}: {change['requests']:,} of {account['rows']:,} requests "
            f"({percent(change['request_share'])}), {percent(change['token_share'])} of the tokens"
        )


def percent(share: float) -> str:
    """A share as per cent, with three digits or one decimal."""
    return f"{100 * share:.1f} %" if share >= 0.01 or not share else f"{100 * share:.2g} %"
