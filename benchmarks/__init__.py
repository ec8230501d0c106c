"""Measurements: each module prints what it measured, on what, against what, as ratios from one run."""
