"""Attacks on finished runs."""
