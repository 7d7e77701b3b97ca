"""Pretraining of the library's own backbone on pictures that formulas draw."""
