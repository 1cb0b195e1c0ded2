"""Data sets, the order of their samples, and loaders."""
