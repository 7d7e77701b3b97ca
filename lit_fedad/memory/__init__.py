"""Memory banks: neighbours, clustering, reduction and coresets."""
