"""Checkpoints: written whole or not at all, checked before use, readable on any number of ranks and at any ZeRO stage."""

from engine.checkpoints.errors import CheckpointError, SaveError

__all__ = ["CheckpointError", "SaveError"]
