"""The critical batch, measured by trainings: branches of one state, and steps to one loss."""
