"""A run that ends early on purpose."""


class RunStoppedError(Exception):
    """An intended early end of a run; its checkpoint is kept, and the same configuration resumes it."""
