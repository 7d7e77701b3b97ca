"""Federations of real sites: machines that share nothing but messages."""
