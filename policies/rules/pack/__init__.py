"""Growth-aware packing: Mell's own policy."""

from policies.rules.pack.policy import Pack

__all__ = ["Pack"]
