"""The paper's ablations on gradient variance: changes to a detector that make the heads' effective batch smaller.

Every pixel, pyramid level and region that a shared head sees is one more sample in its gradient. The paper removes
these one by one, and the gradient variances of heads and backbone become more alike (figure 3, appendix A.3).
"""
