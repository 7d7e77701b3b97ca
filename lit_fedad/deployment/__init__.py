"""Trained detectors in use: they are exported, score new images, learn from more, and are served over HTTP."""
