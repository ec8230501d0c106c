"""Runs as values: variants of the application, windows of traces, and an order for a fair comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.config import ServiceLevelSettings
from deployments.engine.pace import Pace
from policies.cost.service import ServiceLevel
from simulator.autoscaling.rule import LoadMeasure, ScalingRule
from simulator.errors import BadInput
from simulator.planning.cases import POLICIES, SHORT, Contender

SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "mell": {"policy": "pack", "mode": "act"},
    "mell_slo": {"policy": "pack", "mode": "act"},
    "load_balance": {"policy": POLICIES[Contender.LOAD_BALANCE], "mode": "act"},
    "worst_fit": {"policy": "worst_fit", "mode": "act", "moves_per_epoch": 0},
    "pack_unmoved": {"policy": "pack", "mode": "act", "moves_per_epoch": 0},
    "constant": {"policy": "worst_fit", "mode": "act", "moves_per_epoch": 0},
    "serve": {"policy": "worst_fit", "mode": "off"},
    "serve_quick": {"policy": "worst_fit", "mode": "off"},
    "kv": {"policy": "worst_fit", "mode": "off"},
    "kv_quick": {"policy": "worst_fit", "mode": "off"},
}
"""Settings of the scheduler by variant. `serve` leaves the number of replicas to Serve, `kv` to an autoscaler by KV
utilisation; both place by worst fit. Load balancing is that of plans."""

FOLLOWS_LEVEL = ("mell_slo",)
"""The variants that get the service level of the conditions, instead of their slack and foresight."""

SERVE_SCALES = ("serve", "serve_quick")
"""The variants in which Serve's autoscaler decides: with its default delays, with which it closes no replica within ten
minutes, and with those of the conditions."""

KV_SCALES = ("kv", "kv_quick")
"""The variants in which an autoscaler by KV utilisation decides: with Serve's default delays, and with those of the
conditions, whose metrics are then those of a plan's short delays."""

BASELINE = "worst_fit"
"""The default reference of ratios."""

CONSTANT = "constant"
"""The variant with a number of replicas that does not change."""


def default_pace() -> Pace:
    """A model of about ten billion parameters on a GPU with room for 16,384 tokens, at half speed.

    Half, since ingress, client and all replicas share a few cores: with arrivals at half speed as well, the number of
    concurrent requests is the same, and the token rate is half. A token adds the same time to a step in prefill and in
    decode, as in the simulator's costs.
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
class RunWindow:
    """A part of a trace from `start_minute` on; `time_scale` is a factor on times, `token_scale` on lengths."""

    trace: str
    start_minute: float
    time_scale: float = 1.0
    token_scale: float = 1.0

    @property
    def name(self) -> str:
        """The window's name in reports."""
        return f"{self.trace}:{self.start_minute:g} (time x{self.time_scale:g}, tokens x{self.token_scale:g})"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions shared by all variants.

    Requests of the first `warmup_s` seconds do not count, those of the next `seconds` do; Serve's autoscaler needs the
    warm-up to scale to the load. `ongoing` is this autoscaler's target, in requests per replica, `kv_target` that of
    an autoscaler by KV utilisation, as a share; `constant` is the number of replicas that does not change; `upscale_s`
    and `downscale_s` are the delays of the quick variants. The KV capacity of `slack` replicas is kept free.
    `foresight_s` is off by default: the scheduler remembers rises in demand for longer than a run lasts, and every run
    begins with a rise from zero. The service level `ttft_p99_s`, `itl_p99_ms` is for the variants that follow one.
    """

    warmup_s: float = 120.0
    seconds: float = 300.0
    max_replicas: int = 6
    epoch_s: float = 1.0
    slack: float = 0.5
    foresight_s: float = 0.0
    ongoing: int = 10
    kv_target: float = 0.7
    constant: int = 3
    upscale_s: float = 2.0
    downscale_s: float = 30.0
    ttft_p99_s: float | None = None
    itl_p99_ms: float | None = None
    pace: Pace = field(default_factory=default_pace)

    @property
    def until_s(self) -> float:
        """The end of the counted arrivals, in seconds since the replay began."""
        return self.warmup_s + self.seconds

    @property
    def level(self) -> ServiceLevel | None:
        """The service level, None without one."""
        return ServiceLevelSettings(ttft_p99_s=self.ttft_p99_s, itl_p99_ms=self.itl_p99_ms).level

    @property
    def name(self) -> str:
        """The conditions' text in reports."""
        pace = self.pace
        parts = [(self.ttft_p99_s, "TTFT p99 {:g} s"), (self.itl_p99_ms, "ITL p99 {:g} ms")]
        level = " and ".join(text.format(value) for value, text in parts if value is not None)
        return (
            f"{self.seconds:g} s after {self.warmup_s:g} s of warm-up, up to {self.max_replicas} replicas of "
            f"{pace.num_gpu_blocks_override * pace.block_size:,} tokens that start in {pace.startup_s:g} s and decode "
            f"in {1e3 * pace.decode_s:g} ms, epochs of {self.epoch_s:g} s, slack {self.slack:g}, foresight "
            f"{self.foresight_s:g} s; Serve's target is {self.ongoing} requests per replica, that of KV "
            f"utilisation {self.kv_target:.0%}, the constant number is {self.constant}, quick delays are "
            f"{self.upscale_s:g} and {self.downscale_s:g} s; "
            f"service level: {level or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class LiveCase:
    """A run of the application to be made; `repeat` numbers runs that are otherwise equal."""

    variant: str
    window: RunWindow
    repeat: int
    conditions: Conditions

    @property
    def pairs_with(self) -> tuple[RunWindow, int, Conditions]:
        """The key of a pair: equal in runs of different variants that are compared with each other."""
        return self.window, self.repeat, self.conditions


def turns(
    variants: Sequence[str], windows: Sequence[RunWindow], repeats: int, conditions: Conditions
) -> list[LiveCase]:
    """All runs: the windows in turns, and in each window the variants, in rotating order (A B C, C A B)."""
    cases = []
    for turn, (repeat, window) in enumerate((r, w) for r in range(repeats) for w in windows):
        shift = -turn % len(variants)
        cases += [LiveCase(name, window, repeat, conditions) for name in (*variants[shift:], *variants[:shift])]
    return cases


def settings(case: LiveCase) -> dict[str, Any]:
    """The application's settings, in addition to those of `examples/tiny.yaml`."""
    conditions = case.conditions
    least, most = bounds_of(case)
    scaling: dict[str, float] = {"min_replicas": least, "initial_replicas": least, "max_replicas": most}
    if case.variant in SERVE_SCALES:
        scaling["target_ongoing_requests"] = conditions.ongoing
    if case.variant == "serve_quick":
        scaling |= {"upscale_delay_s": conditions.upscale_s, "downscale_delay_s": conditions.downscale_s}
    if case.variant in FOLLOWS_LEVEL:
        kept: dict[str, Any] = {"slo": {"ttft_p99_s": conditions.ttft_p99_s, "itl_p99_ms": conditions.itl_p99_ms}}
    else:
        kept = {"slack": conditions.slack, "foresight_s": conditions.foresight_s}
    return {
        "engine": "paced",
        "engine_kwargs": conditions.pace.model_dump(),
        "scheduler": {**SCHEDULERS[case.variant], "epoch_s": conditions.epoch_s, **kept},
        "deployment_config": {"autoscaling_config": scaling},
    }


def bounds_of(case: LiveCase) -> tuple[int, int]:
    """The least and the largest number of replicas."""
    constant = case.conditions.constant
    return (constant, constant) if case.variant == CONSTANT else (1, case.conditions.max_replicas)


def rule_of(case: LiveCase) -> ScalingRule | None:
    """The rule of the autoscaler beside the application; None where Mell or Serve scales."""
    if case.variant not in KV_SCALES:
        return None
    conditions = case.conditions
    usual = ScalingRule(LoadMeasure.KV, conditions.kv_target)
    if case.variant == "kv":
        return usual
    return replace(
        usual,
        upscale_delay_s=conditions.upscale_s,
        downscale_delay_s=conditions.downscale_s,
        look_back_s=SHORT.look_back_s,
        push_s=SHORT.push_s,
    )


def read_level(text: str) -> ServiceLevelSettings:
    """Parse a service level of the command line, like `ttft_p99_s=2,itl_p99_ms=200`. Raises `BadInput`."""
    parts = (part.partition("=") for part in text.split(","))
    try:
        return ServiceLevelSettings.model_validate({name: float(value) for name, _, value in parts})
    except ValueError:
        raise BadInput(f"{text} is not a service level: write ttft_p99_s=2, itl_p99_ms=200, or both.") from None


def read_window(text: str, token_scale: float = 1.0) -> RunWindow:
    """Parse a window of the command line, `trace:minute` or `trace:minute:scale`. Raises `BadInput`."""
    trace, *numbers = text.split(":")
    try:
        minute, scale = map(float, [*numbers, "1"] if len(numbers) == 1 else numbers)
    except ValueError:
        raise BadInput(f"{text} is not a window: write trace:minute or trace:minute:scale, like azure:10:2.") from None
    return RunWindow(trace, minute, scale, token_scale)
