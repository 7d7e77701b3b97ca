"""Sections of the report: each yields tables and figures out of complete runs."""
