"""What one training run needs: settings, optimiser, updates, evaluation."""
