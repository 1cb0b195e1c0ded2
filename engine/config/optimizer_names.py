"""How the optimizers are spelled. Any case is accepted, so that "adamw" and "ADAMW" mean AdamW."""

from __future__ import annotations

_OURS_AND_TORCHS = """
    AGVMAdamW AGVMSGD AGVMLAMB AGVMLARS LAMB LARS PMDLAMB
    ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam
"""  # a test compares them with the classes
_SPELLING = {name.lower(): name for name in _OURS_AND_TORCHS.split()}


def spelled(name: str) -> str:
    """The name as its class is called; an unknown one as it stands."""
    return _SPELLING.get(name.lower(), name)
