"""Scores of segmentation, computed from small tables per image that ranks gather instead of maps."""
