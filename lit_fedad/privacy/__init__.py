"""Measurements of how much the shared data reveal about the clients' raw data."""
