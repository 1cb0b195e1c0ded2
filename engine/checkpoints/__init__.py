"""Checkpoints: written completely or not at all, checked before use, read on any number of ranks and at any stage."""
