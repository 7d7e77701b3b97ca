"""Rounds, for any method: the loop and what it needs."""
