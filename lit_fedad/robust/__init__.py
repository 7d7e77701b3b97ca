"""Defences of the server against clients whose messages have the declared form and lie."""
