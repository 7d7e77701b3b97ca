"""Metrics of anomaly detection as mergeable torchmetrics classes."""
