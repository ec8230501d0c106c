"""The models that Mell brings along: each is served under its `model_id`, without a `model_source`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from app.smollm2 import ensure_smollm2
from app.tinymodel import ensure_tiny_model

SHIPPED: Mapping[str, Callable[[], Path]] = {"mell-tiny": ensure_tiny_model, "smollm2-135m": ensure_smollm2}
"""The functions that make them, by `model_id`."""
