"""Trained models: loaded from a checkpoint, scored, run on images, exported."""
