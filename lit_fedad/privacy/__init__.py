"""How much of the raw data can be told from what clients share."""
