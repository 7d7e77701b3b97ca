"""Studies: what is searched, workers that share a search, and what came of it."""
