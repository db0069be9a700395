"""What one training run needs: settings, optimiser, schedule, memory, bits per byte."""
