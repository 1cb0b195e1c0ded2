"""UniNet-G + HTC-X without its mask branch, as the paper fine-tunes on Objects365."""

_base_ = "uninet_g_htcx.py"

model = dict(roi_head=dict(mask_roi_extractor=None, mask_head=None))
