"""MLflow tracking."""
