"""Rounds of any method: the round loop and its parts."""
