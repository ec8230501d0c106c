"""A scheduler imports the policy that it is set to, and no other one."""

import subprocess
import sys

import pytest

RULES = frozenset({"best_fit", "worst_fit", "load_balance", "mell", "pack"})

IMPORTED = f"""
import sys
import deployments.scheduler.deployment
from deployments.config import SchedulerConfig
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory

policies = sys.argv[1:] or [SchedulerConfig().policy]
for policy in policies:
    PoolMemory(Terms(policy=SchedulerConfig(policy=policy).policy))
print(*[rule for rule in {sorted(RULES)} if f"policies.rules.{{rule}}" in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "imported"), [([], "pack"), (["mell"], "mell"), (["worst_fit"], "worst_fit")])
def test_it_imports_the_chosen_policy(chosen: list[str], imported: str) -> None:
    command = [sys.executable, "-c", IMPORTED, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == [imported]
