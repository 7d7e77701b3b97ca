"""Console output, figures, tables and pages about runs."""
