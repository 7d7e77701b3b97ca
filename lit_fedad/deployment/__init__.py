"""Trained detectors in use: scoring new images, export."""
