"""The arithmetic of the metrics as pure functions."""
