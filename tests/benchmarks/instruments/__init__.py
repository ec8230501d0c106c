"""Tests of the instruments that benchmarks share."""
