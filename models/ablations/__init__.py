"""The paper's ablations on gradient variance, as changes to a detector: they make the heads' effective batch smaller.

Every pixel, pyramid level and region that a shared head sees counts as one more sample in its gradient. The paper takes
these away one by one and watches the gradient variances of heads and backbone come together (figure 3, appendix A.3).
"""
