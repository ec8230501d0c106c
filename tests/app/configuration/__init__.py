"""Operators' files and what they mean."""
