"""Tests of the repetition of MemServe's evaluation."""
