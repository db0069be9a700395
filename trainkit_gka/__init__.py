"""What the trainers share: the loop, flags, processes and devices, checkpoints, files, progress, results, pictures."""
