"""The metrics as pure functions of tensors."""
