"""Models: built from a name, with weights from a file, in the run's precision."""
