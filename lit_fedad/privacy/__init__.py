"""Protection of the clients' images: secure sums, differential privacy and its accounting.

Secure aggregation is the protocol of Bonawitz et al. (Practical Secure Aggregation for Privacy-Preserving Machine
Learning, CCS 2017), against a server that is honest but curious. It uses pairwise masks that cancel in the sum, an
additional mask of each client's own, and Shamir shares of both kinds of secrets, so that clients may drop out.
"""
