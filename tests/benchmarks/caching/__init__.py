"""Tests of the measurements of cached prompts."""
