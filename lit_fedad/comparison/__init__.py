"""Tables and pages that compare runs."""
