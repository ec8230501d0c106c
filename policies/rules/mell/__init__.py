"""The paper's scheduling algorithm (MELL, section VI), as printed and repaired."""

from policies.rules.mell.policy import Mell, mell, mell_repaired

__all__ = ["Mell", "mell", "mell_repaired"]
