"""Studies: many short runs that compare methods over batch sizes, all tuned equally."""
