"""What differs between detection, instance, panoptic and semantic segmentation, and classification."""
