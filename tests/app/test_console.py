"""The lines of a start that are shown, and those that are not."""

from collections.abc import Iterable

import pytest

from app.console import Console
from app.service.starting import _READY

INGRESS = "\x1b[36m(ServeReplica:mell:Ingress pid=568)\x1b[0m "
ENGINE = "\x1b[36m(ServeReplica:mell:Engine pid=531, ip=10.0.0.1)\x1b[0m "
CONTROLLER = "\x1b[36m(ServeController pid=429)\x1b[0m "
TIME = "2026-11-27 12:38:38,575"

NOISE = [
    f"{TIME}\tINFO scripts.py:489 -- Running config file: 'serve_config.yaml'.",
    "[2026-11-27 12:36:46,960 W 11 11] network_util.cc:330: Failed to determine local IP",
    f"{CONTROLLER}INFO {TIME} controller 429 -- Deploying new app 'mell'.",
    f"{CONTROLLER}WARNING {TIME} controller 429 -- Cannot deregister autoscaling state for deployment Deployment(n)",
    f"{CONTROLLER}WARNING {TIME} controller 429 -- Deployment 'Engine' in application 'mell' has 2 replicas that have "
    "taken more than 30s to initialize.",
    f"{CONTROLLER}This may be caused by a slow __init__ or reconfigure method.",
    f"{INGRESS}INFO {TIME} mell_Ingress zcadffm6 -- Started <ray.serve._private.router.SharedRouterLongPollClient ob>.",
    f"{INGRESS}INFO {TIME} mell_Ingress zcadffm6 -- listening on http://127.0.0.1:8000",
    f"{ENGINE}libtcmalloc is not found in LD_PRELOAD.",
    f"{ENGINE}/venv/vllm/executor.py:152: UserWarning: Failed to get the IP address",
    f"{ENGINE}  mq_connect_ip = get_ip()",
    f"{ENGINE}\rLoading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\rLoading: 100%",
    f"\r{ENGINE}Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
    ENGINE,
]
RAY = (
    f"{TIME}\tINFO worker.py:2029 -- Started a local Ray instance. View the dashboard at \x1b[32mhttp://127.0.0.1:8265 "
)
TOKEN = f"{TIME}\tWARNING authentication_token_setup.py:85 -- Token authentication is enabled for this Ray cluster."
_SAID = _READY.format(url="http://x", model="")
READY = [f"{INGRESS}{line}" for line in f"INFO {TIME} mell_Ingress z -- {_SAID}".splitlines()]
WARNING = f"{ENGINE}WARNING {TIME} mell_Engine g99h16co -- the guard ended"
MOVED = f"{ENGINE}INFO {TIME} mell_Engine g99h16co -- moved"


def shown(lines: Iterable[str], console: Console | None = None) -> list[str]:
    console = console or Console()
    return [chosen for line in lines for chosen in console.choose(line + "\n")]


@pytest.mark.parametrize("line", NOISE)
def test_what_nobody_can_act_on_is_not_shown(line: str) -> None:
    assert shown([line]) == []


def test_a_start_shows_its_progress_and_at_last_all_addresses() -> None:
    progress = [f"{INGRESS}INFO {TIME} mell_Ingress z -- {number} of 2 engines run" for number in (0, 1)]
    lines = shown([*NOISE, TOKEN, RAY, *NOISE, *progress, MOVED, *NOISE, *READY, *NOISE[8:]])
    assert lines[:4] == ["Ray runs; the application starts", "0 of 2 engines run", "1 of 2 engines run", lines[3]]
    assert lines[3].startswith("Mell is ready")
    addresses = ["  API        http://x/v1", "  live page  http://x/mell/", lines[-1]]
    assert lines[-3:] == addresses
    assert "http://127.0.0.1:8265" in lines[-1] and "get-auth-token" in lines[-1]


def test_without_token_authentication_no_token_is_mentioned() -> None:
    assert shown([RAY, *READY])[-1] == "  dashboard  http://127.0.0.1:8265 (Ray's)"


def test_once_ready_mells_own_lines_are_shown() -> None:
    console = Console()
    shown(READY, console)
    assert shown([MOVED, NOISE[2], NOISE[6]], console) == ["12:38:38 Engine g99h16co: moved"]


FAILED = [
    f"{CONTROLLER}ERROR {TIME} controller 429 -- Exception in Replica(id='a'), the replica will be stopped.",
    f"{CONTROLLER}Traceback (most recent call last):",
    f'{CONTROLLER}  File "a.py", line 1, in f',
    f"{CONTROLLER}ValueError: wrong,",
    f"{CONTROLLER}in two lines",
]
CRASHED = [
    f"{ENGINE}Traceback (most recent call last):",
    f'{ENGINE}  File "a.py", line 1, in f',
    f"{ENGINE}ValueError: wrong",
]
ERRORS = [
    FAILED,
    CRASHED,
    [f"{ENGINE}(EngineCore pid=1) ERROR 11-27 12:49:04 [core.py:1512] EngineCore failed to start."],
    [f"{TIME}\tERROR scripts.py:600 -- Received unexpected error"],
    ["[2026-11-27 12:36:46,960 C 11 11] core_worker.cc:1: Check failed"],
    ["Usage: serve run [OPTIONS]", "Error: Invalid value"],
    ["(raylet) 1 Workers killed due to memory pressure"],
    ["the raylet, process 7, has ended; its logs: /tmp/ray/session/logs/raylet.err"],
]


@pytest.mark.parametrize("lines", ERRORS, ids=lambda lines: lines[0][-30:])
def test_errors_are_shown_whole_and_what_follows_them_is_not(lines: list[str]) -> None:
    console = Console()
    assert [line.split()[-1] for line in shown([*NOISE, *lines], console)] == [line.split()[-1] for line in lines]
    assert shown([f"{ENGINE}INFO {TIME} mell_Engine g -- loading", *NOISE], console) == []


def test_warnings_of_mell_and_of_the_build_are_shown() -> None:
    built = f"(build_serve_application pid=430) WARNING {TIME} controller build_mell_430 -- vllm 0.33 is installed"
    assert shown([WARNING, built]) == [
        "12:38:38 WARNING Engine g99h16co: the guard ended",
        "12:38:38 WARNING controller build_mell_430: vllm 0.33 is installed",
    ]


def test_after_a_request_to_end_only_mells_warnings_are_left() -> None:
    console = Console()
    console.ends = True
    rest = [line for lines in ERRORS for line in lines]
    assert shown([*READY, *rest, MOVED, WARNING], console) == ["12:38:38 WARNING Engine g99h16co: the guard ended"]


GIVEN_UP = f"{CONTROLLER}ERROR {TIME} controller 429 -- Failed to update the deployments ['Ingress']."


def test_serves_verdict_counts_before_the_application_is_ready_and_before_an_end_is_requested() -> None:
    before, after, ending = Console(), Console(), Console()
    shown([GIVEN_UP], before)
    shown([*READY, GIVEN_UP], after)
    ending.ends = True
    shown([GIVEN_UP], ending)
    assert (before.has_failed, after.has_failed, ending.has_failed) == (True, False, False)


def test_errors_of_a_replica_that_is_tried_again_are_no_verdict() -> None:
    console = Console()
    shown([f"{INGRESS}ERROR {TIME} mell_Ingress z -- Failed to update the deployments", *NOISE], console)
    assert not console.has_failed
