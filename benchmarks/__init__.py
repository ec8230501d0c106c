"""Measurements. Each module prints its figures with their conditions, as ratios to a reference from the same run."""
