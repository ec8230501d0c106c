"""Copies of cached prefixes between replicas: why they are ordered."""

from enum import StrEnum


class CopyReason(StrEnum):
    """Why a prefix is copied to another replica's cache."""

    MANUAL = "manual"
    """An operator has ordered it."""
