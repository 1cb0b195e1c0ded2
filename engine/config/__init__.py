"""One JSON drives a run: DeepSpeed's own keys plus our blocks, typed and validated before anything is built."""

from engine.config.batch import BatchPlan, solve_batch
from engine.config.errors import ConfigError, UserError
from engine.config.load import load_config, parse_config
from engine.config.schema import RunConfig

__all__ = ["BatchPlan", "ConfigError", "RunConfig", "UserError", "load_config", "parse_config", "solve_batch"]
