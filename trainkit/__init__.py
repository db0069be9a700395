"""What both trainers share: processes and devices, checkpoints, files, progress, command lines."""
