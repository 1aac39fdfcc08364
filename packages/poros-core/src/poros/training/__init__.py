"""Training with Poros: data, the Trainer run, progress and resume."""
