"""Lightning's own Trainer, as a user of a task alone has it."""

import lightning as L


def plain_trainer(epochs: int = 1, **settings) -> L.Trainer:
    """A Trainer on the CPU that writes and prints nothing."""
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
