"""HTC-X: the parts of the detector that mmdet does not have."""
