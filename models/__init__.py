"""Model zoo: the kernels that mmdet needs, and the models we add to timm and mmdet.

Importing this package puts our kernels under mmcv.ops, so it comes before the first import of mmdet, and registers
UniNet with timm. mmdet is not imported: `models.mmdet_setup.import_mmdet` does that and registers our parts with it.
"""

import models.uninet.classifier  # noqa: F401  registers uninet_* with timm
from models.mmcv_kernels import install

install()
