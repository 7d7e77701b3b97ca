"""How knowledge is exchanged: one file an algorithm."""
