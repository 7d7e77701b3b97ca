"""Tasks: what a client learns and how it scores images, one LightningModule per file."""
