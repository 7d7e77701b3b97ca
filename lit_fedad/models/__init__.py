"""Plain nn.Modules, and nothing else."""
