"""Metrics of anomaly detection as mergeable torchmetrics classes."""

from lit_fedad.core.lazy_names import lazy_names

# Imported when they are asked for: most modules of this package need one another, and few need all.
_NAMES = {
    "AnomalyMetrics": "anomaly.AnomalyMetrics",
    "ClassificationMetrics": "classification.ClassificationMetrics",
    "ContinualAccuracy": "continual.ContinualAccuracy",
    "DriftTest": "drift.DriftTest",
    "SemanticMetrics": "semantic.SemanticMetrics",
    "Stability": "drift.Stability",
    "summarise": "federated.summarise",
}
__all__ = [*_NAMES]
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
