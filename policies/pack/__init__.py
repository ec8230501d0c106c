"""Growth-aware packing: Mell's own policy."""

from policies.pack.policy import Pack

__all__ = ["Pack"]
