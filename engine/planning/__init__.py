"""What a run will need, worked out before it is started: shards, traffic, memory, time."""
