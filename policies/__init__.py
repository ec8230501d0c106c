"""Placement decisions: pure functions over values, free of Ray, vLLM, clocks and I/O."""
