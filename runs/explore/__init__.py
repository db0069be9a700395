"""A page to explore trained models with: their attention, and what follows when the bandwidths are scaled."""
