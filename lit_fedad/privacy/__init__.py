"""What protects the clients' images: secure sums, differential privacy, its accounting.

Secure aggregation is the protocol of Bonawitz et al. (Practical Secure Aggregation for Privacy-Preserving Machine
Learning, CCS 2017), against a server that follows it and is curious: pairwise masks that cancel in the sum, a mask of
each client's own beside them, and Shamir shares of both so that clients may drop out.
"""
