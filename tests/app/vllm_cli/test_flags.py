"""Every flag of the installed vLLM is in exactly one table, and the page lists all of them."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest

from app.vllm_cli.flags import (
    ENGINE,
    FRONTEND,
    FRONTEND_ARGUMENTS,
    IGNORED,
    PATHS,
    PLACED,
    REFUSED,
    REMOVED,
    experts_over_ranks,
    option,
    removed_flags,
    why_refused,
)
from docs.make.flags import PAGE, page

TABLES: tuple[Iterable[str], ...] = (PLACED, ENGINE, FRONTEND, IGNORED, REFUSED)
NAMES = frozenset(chain(*TABLES))


def test_a_flag_is_in_one_table_only() -> None:
    assert [name for name, count in Counter(chain(*TABLES)).items() if count > 1] == []


@pytest.mark.slow
def test_the_tables_have_every_flag_of_vllm() -> None:
    from app.vllm_cli.command_line import OWN, make_parser

    _, parser = make_parser()
    names = {action.dest for action in parser._actions} - {"help", *OWN}
    assert sorted(names ^ NAMES) == []


@pytest.mark.slow
def test_flags_are_written_as_vllm_writes_them() -> None:
    from app.vllm_cli.command_line import make_parser

    _, parser = make_parser()
    spelled = {flag for action in parser._actions for flag in action.option_strings}
    assert {option(name) for name in NAMES - {"model_tag"}} <= spelled
    assert option("enforce_eager", False) in spelled


@pytest.mark.slow
def test_engine_flags_are_arguments_of_vllms_engine() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    from deployments.engine.arguments import OWNED

    assert {field.name for field in fields(AsyncEngineArgs)} - set(OWNED) >= ENGINE
    assert set(OWNED) <= REFUSED.keys() | PLACED.keys()


@pytest.mark.slow
def test_frontend_flags_are_arguments_of_vllms_server() -> None:
    from dataclasses import fields

    from app.vllm_cli.arguments import FrontendArgs

    assert {field.name for field in fields(FrontendArgs)} >= FRONTEND_ARGUMENTS


def test_files_are_named_by_flags_that_are_passed_on() -> None:
    assert {*PATHS} <= {*ENGINE, *FRONTEND, "chat_template", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}


def test_a_reason_ends_a_message() -> None:
    assert [reason for reason in (*REFUSED.values(), *IGNORED.values()) if not reason or reason.endswith(".")] == []


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


def test_page_has_every_flag() -> None:
    assert [name for name in (NAMES | REMOVED.keys()) - {"model_tag"} if f"`{option(name)}`" not in page()] == []


@pytest.mark.slow
def test_removed_flags_are_not_vllms() -> None:
    from app.vllm_cli.command_line import make_parser

    _, parser = make_parser()
    assert REMOVED.keys() & {action.dest for action in parser._actions} == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["m", "--swap-space", "4"], ["--swap-space: vLLM removed it in 0.18: "]),
        (["m", "--swap_space=4", "--port", "1"], ["--swap-space: "]),
        (["--no-enable-lora-bias", "m"], ["--no-enable-lora-bias: vLLM removed it in 0.11.1: remove it"]),
        (["m", "--disable-log-requests", "--task", "embed"], ["--disable-log-requests: ", "--task: "]),
        (["swap_space", "--max-model-len", "8"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_removed_flag_is_named_with_its_version(line: list[str], found: list[str]) -> None:
    lines = removed_flags(line)
    assert len(lines) == len(found) and all(map(str.startswith, lines, found))


def test_a_removed_argument_of_engines_is_named_in_their_words() -> None:
    reason = why_refused("guided_decoding_backend", "outlines")
    assert reason is not None and "0.12" in reason and "structured_outputs_config" in reason


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ({"enable_expert_parallel": True, "data_parallel_size": 8}, 8),
        ({"enable_expert_parallel": True, "data_parallel_size": 4, "tensor_parallel_size": 2}, 8),
        ({"enable_expert_parallel": True, "data_parallel_size_local": 8}, 8),
        ({"enable_expert_parallel": True, "data_parallel_size": 16, "data_parallel_size_local": 8}, 16),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 8}, None),
        ({"enable_expert_parallel": False, "data_parallel_size": 8}, None),
        ({"enable_expert_parallel": True, "data_parallel_size": 1, "all2all_backend": "x"}, None),
        ({"data_parallel_size": 8}, None),
    ],
    ids=str,
)
def test_experts_over_ranks_are_one_model(arguments: dict[str, object], gpus: int | None) -> None:
    assert experts_over_ranks(arguments) == gpus
