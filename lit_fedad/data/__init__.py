"""Image sets, their partition among clients, and the batches made of them."""
