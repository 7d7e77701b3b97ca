"""Anomaly-detection metrics that merge over batches, processes and clients."""
