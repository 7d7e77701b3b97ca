"""Evaluators of clients."""
