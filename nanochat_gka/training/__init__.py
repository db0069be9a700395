"""Parts of a training run: optimiser, schedule, memory, bits per byte."""
