"""What is run, as values: variants of the application, windows of traces, and an order that makes a fair comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.replay.trace import ReplayInputError
from deployments.engine.pace import Pace

SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "mell": {"policy": "pack", "mode": "act"},
    "worst_fit": {"policy": "worst_fit", "mode": "act", "moves_per_epoch": 0},
    "pack_unmoved": {"policy": "pack", "mode": "act", "moves_per_epoch": 0},
    "serve": {"policy": "worst_fit", "mode": "off"},
    "serve_quick": {"policy": "worst_fit", "mode": "off"},
}
"""Settings of the scheduler. `serve` leaves the number of replicas to Serve, and places where there is most room."""

DELAYS: Mapping[str, Mapping[str, float]] = {
    "serve": {},
    "serve_quick": {"upscale_delay_s": 2.0, "downscale_delay_s": 30.0},
}
"""Settings of Serve's autoscaler where it decides; as they are by default, it closes nothing within ten minutes."""

BASELINE = "worst_fit"
"""What ratios are to, unless told otherwise."""


def default_pace() -> Pace:
    """A model of some ten billion parameters on a GPU with room for 16,384 tokens, at half speed.

    Half, since ingress, client and all replicas share a few cores: with arrivals at half speed, too, as many requests
    run at once, and half as many tokens pass through. What a token adds to a step is the same in prefill and decode, as
    the simulator's costs have it.
    """
    return Pace(
        num_gpu_blocks_override=1024,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        decode_s=0.050,
        decode_s_per_seq=1 / 8000,
        prefill_tokens_per_s=8000.0,
        startup_s=20.0,
    )


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace, from `start_minute` on; `time_scale` stretches its time, `token_scale` its lengths."""

    trace: str
    start_minute: float
    time_scale: float = 1.0
    token_scale: float = 1.0

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"{self.trace}:{self.start_minute:g} (time x{self.time_scale:g}, tokens x{self.token_scale:g})"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all variants have in common.

    Requests of the first `warmup_s` seconds do not count (by their end Serve's autoscaler, too, has begun to scale and
    caught up), those of the next `seconds` do. `ongoing` is what that autoscaler aims at: requests per replica.
    `slack` replicas' worth of KV capacity is kept free. Without `foresight_s` no more than that: how fast demand has
    risen is remembered for longer than a run lasts, and a run begins with a rise from nothing.
    """

    warmup_s: float = 120.0
    seconds: float = 300.0
    max_replicas: int = 6
    epoch_s: float = 1.0
    slack: float = 0.5
    foresight_s: float = 0.0
    ongoing: int = 10
    pace: Pace = field(default_factory=default_pace)

    @property
    def until_s(self) -> float:
        """When the last request that counts has arrived, in seconds since the replay began."""
        return self.warmup_s + self.seconds

    @property
    def name(self) -> str:
        """How reports call them."""
        pace = self.pace
        return (
            f"{self.seconds:g} s after {self.warmup_s:g} s of warm-up, up to {self.max_replicas} replicas of "
            f"{pace.num_gpu_blocks_override * pace.block_size:,} tokens that start in {pace.startup_s:g} s and decode "
            f"in {1e3 * pace.decode_s:g} ms, epochs of {self.epoch_s:g} s, slack {self.slack:g}, foresight "
            f"{self.foresight_s:g} s; Serve aims at {self.ongoing} requests each"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One run; `repeat` counts runs of the same."""

    variant: str
    window: Window
    repeat: int
    conditions: Conditions

    @property
    def pairs_with(self) -> tuple[Window, int, Conditions]:
        """Runs of other variants that this one is compared with have the same."""
        return self.window, self.repeat, self.conditions


def turns(variants: Sequence[str], windows: Sequence[Window], repeats: int, conditions: Conditions) -> list[Case]:
    """All runs: every window in turns, and within one the variants, beginning with another each time (A B C, C A B)."""
    cases = []
    for turn, (repeat, window) in enumerate((r, w) for r in range(repeats) for w in windows):
        shift = -turn % len(variants)
        cases += [Case(name, window, repeat, conditions) for name in (*variants[shift:], *variants[:shift])]
    return cases


def settings(case: Case) -> dict[str, Any]:
    """The application's settings, beside those that `serve_config.yaml` has."""
    conditions = case.conditions
    scaling: dict[str, float] = {"min_replicas": 1, "initial_replicas": 1, "max_replicas": conditions.max_replicas}
    if case.variant in DELAYS:
        scaling |= {"target_ongoing_requests": conditions.ongoing, **DELAYS[case.variant]}
    scheduler = {"epoch_s": conditions.epoch_s, "slack": conditions.slack, "foresight_s": conditions.foresight_s}
    return {
        "engine": "paced",
        "engine_kwargs": conditions.pace.model_dump(),
        "scheduler": {**SCHEDULERS[case.variant], **scheduler},
        "deployment_config": {"autoscaling_config": scaling},
    }


def read_window(text: str, token_scale: float = 1.0) -> Window:
    """Parse a window from the command line: `trace:minute` or `trace:minute:time scale`. Raises ReplayInputError."""
    trace, *numbers = text.split(":")
    try:
        minute, scale = map(float, [*numbers, "1"] if len(numbers) == 1 else numbers)
    except ValueError:
        raise ReplayInputError(
            f"{text} is not a window: write trace:minute or trace:minute:scale, like azure:10:2."
        ) from None
    return Window(trace, minute, scale, token_scale)
