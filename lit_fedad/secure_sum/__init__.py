"""Secure aggregation: a server learns the sum of what clients send, and nothing that is one client's alone.

The protocol of Bonawitz et al. (Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017),
against a server that follows it and is curious: pairwise masks that cancel in the sum, a mask of each client's own
beside them, and Shamir shares of both so that clients may drop out.
"""
