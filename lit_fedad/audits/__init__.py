"""Attacks on finished runs: membership inference, inversion, distance correlation."""
