"""From documents to batches of packed rows."""

SPLITS = ("train", "val")
