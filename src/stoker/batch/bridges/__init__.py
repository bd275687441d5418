"""Batch control for trainings that another library drives: the Trainer of transformers, and Lightning.

Each module imports its library; import the one you use.
"""
