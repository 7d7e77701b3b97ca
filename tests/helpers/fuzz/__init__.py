"""Forged uploads: honest runs are recorded, one message of them is forged, and the server's state is compared."""
