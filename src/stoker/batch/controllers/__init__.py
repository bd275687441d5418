"""Schedules of the batch that are decided while a training runs: by the noise scale, by a plateau."""
