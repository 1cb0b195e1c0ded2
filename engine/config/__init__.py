"""The typed config of a run: DeepSpeed's own keys plus our blocks, validated before anything is built."""

from engine.config.batch import BatchPlan, solve_batch
from engine.config.schema import RunConfig

__all__ = ["BatchPlan", "RunConfig", "solve_batch"]
