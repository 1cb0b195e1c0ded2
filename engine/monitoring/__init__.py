"""The output of a run: a live line, records on disk, and pictures made from the records."""
