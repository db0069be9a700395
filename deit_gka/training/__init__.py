"""The parts of a training run: settings, optimiser, updates, evaluation."""
