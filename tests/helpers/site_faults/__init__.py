"""Federations of sites in processes of their own, with faults at random moments."""
