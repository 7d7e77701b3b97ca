"""Attacks on finished runs, and measures of what shared data reveal: membership, inversion, distance correlation."""
