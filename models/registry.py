"""Importing this registers all our parts with mmdet. mmdet's own modules come first."""

import models.ablations.heads
import models.htcx.box_head
import models.htcx.pyramid
import models.htcx.roi_head
import models.mmdet_faults
import models.semantic_fpn
import models.step_resize
import models.timm_backbone
import models.uninet.backbone  # noqa: F401
