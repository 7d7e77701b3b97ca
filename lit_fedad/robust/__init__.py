"""Defences of the server against clients that send false values in the declared form of a message."""
