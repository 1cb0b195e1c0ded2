"""UniNet: convolutions in the fine stages, attention in the coarse ones; as mmdet backbone and timm classifier."""
