"""A run that ends early on purpose."""


class RunStoppedError(Exception):
    """Ends a run early and on purpose; its checkpoint holds, and the same configuration resumes it."""
