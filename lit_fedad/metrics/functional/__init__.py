"""The arithmetic behind the metrics, as pure functions."""
