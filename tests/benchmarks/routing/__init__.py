"""Tests of the benchmark of routing by content."""
