"""Model zoo: what mmdet needs to run here, and the detectors we add to it."""
