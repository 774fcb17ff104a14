"""`shoal train`: the data that the bundled model learns from, made by seeded tasks, and its training run."""
