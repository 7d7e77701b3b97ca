from lit_fedad.metrics.anomaly import AnomalyMetrics as AnomalyMetrics
from lit_fedad.metrics.classification import ClassificationMetrics as ClassificationMetrics
from lit_fedad.metrics.continual import ContinualAccuracy as ContinualAccuracy
from lit_fedad.metrics.drift import DriftTest as DriftTest
from lit_fedad.metrics.drift import Stability as Stability
from lit_fedad.metrics.federated import summarise as summarise
from lit_fedad.metrics.semantic import SemanticMetrics as SemanticMetrics

__all__ = [
    "AnomalyMetrics",
    "ClassificationMetrics",
    "ContinualAccuracy",
    "DriftTest",
    "SemanticMetrics",
    "Stability",
    "summarise",
]
