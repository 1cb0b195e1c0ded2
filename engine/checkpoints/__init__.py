"""Checkpoints: written completely or not at all, checked before use, readable on any number of ranks and at any ZeRO stage."""
