"""Trainings of one target at chosen settings, as series that can be compared."""
