"""Model zoo: what mmdet needs to run here, and the detectors we add to it.

Importing this package puts mmcv's kernels in place, so it comes before the first import of mmdet.
"""

from models.mmcv_kernels import install

install()
