"""Pictures of matrices of weights, for every trainer: sheets and scales, numbers, charts."""
