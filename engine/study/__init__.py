"""Methods against batch sizes: many short runs, equally tuned, and what they say together."""
