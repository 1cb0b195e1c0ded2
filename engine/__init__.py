"""The training engine: config, data, trainer, evaluation, checkpoints, monitoring."""
