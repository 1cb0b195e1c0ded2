"""The parts of HTC-X that mmdet does not have."""
