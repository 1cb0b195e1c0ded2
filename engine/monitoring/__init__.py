"""What a run shows: a live line, records on disk, and pictures made from the records."""
