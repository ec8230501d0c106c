"""The search for the fewest devices."""

import pytest

from simulator.models.cases import SharingCase, SharingContender
from simulator.models.outcome import ModelService, SharedOutcome
from simulator.models.search import best_cases, fewest_devices

MELL, STATIC, OWN = SharingContender.MELL, SharingContender.STATIC, SharingContender.OWN


def outcome(devices: float, late: int) -> SharedOutcome:
    return SharedOutcome(100.0 * devices, devices, ModelService(100, 0.1, 0.2, late, 0), {}, None)


def keeps(found: SharedOutcome) -> bool:
    return found.keeps_level


@pytest.mark.parametrize("needed", [1, 2, 7, 16, 17])
def test_the_fewest_devices_are_found(needed: int) -> None:
    runs: list[int] = []

    def run(devices: int) -> SharedOutcome | None:
        runs.append(devices)
        return None if devices < needed / 2 else outcome(devices, 0 if devices >= needed else 5)

    found = fewest_devices(16, run, keeps)
    assert (found and found[0]) == (needed if needed <= 16 else None)
    assert len(runs) == len(set(runs)) <= 8
    assert min(runs) >= (needed - 1) * 0.6, "no run has far too few devices"


def test_of_a_contenders_settings_the_one_with_the_fewest_devices_counts() -> None:
    needed = {1.0: 9, 2.0: 4, 3.0: 4}
    cases = [SharingCase(MELL, homes) for homes in needed]
    (found,) = best_cases(cases, 16, lambda case, n: outcome(n, 0 if n >= needed[case.setting] else 9), keeps)
    assert (found.case.setting, found.devices, found.kept) == (2.0, 4, True)


def test_a_contender_that_misses_the_level_is_shown_and_one_that_does_not_fit_is_not() -> None:
    def perform(case: SharingCase, devices: int) -> SharedOutcome | None:
        return None if case.contender is STATIC else outcome(devices, int(case.setting))

    found = best_cases([SharingCase(STATIC), SharingCase(MELL, 30), SharingCase(MELL, 20)], 16, perform, keeps)
    assert [(each.case.setting, each.devices, each.kept) for each in found] == [(20, 16, False)]


def test_devices_of_the_contenders_own_are_as_they_come() -> None:
    cases = [SharingCase(OWN, number) for number in (3, 2)]
    (found,) = best_cases(cases, 16, lambda case, n: outcome(case.setting, 0), keeps)
    assert found.outcome.gpu_seconds == 200.0
