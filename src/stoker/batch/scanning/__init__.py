"""A few trainings side by side, at equal samples: batch sizes, and learning rates around the one in use."""
