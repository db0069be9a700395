"""From documents to batches of packed rows."""
