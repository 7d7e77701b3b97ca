"""Parts that methods are built from; no method of its own."""
