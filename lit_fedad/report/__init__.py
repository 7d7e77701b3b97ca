"""What a person sees: console lines, figures, heatmaps."""
