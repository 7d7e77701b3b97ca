"""What a client learns and how it scores: one LightningModule a file."""
