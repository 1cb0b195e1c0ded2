"""UniNet: convolutions in the fine stages, attention in the coarse ones. A timm model and an mmdet backbone."""
