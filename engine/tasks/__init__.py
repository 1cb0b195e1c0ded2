"""What detection, instance, panoptic and semantic segmentation, and classification do differently."""
