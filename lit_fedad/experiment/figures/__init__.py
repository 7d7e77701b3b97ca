"""Figures of one run, drawn by callbacks."""
