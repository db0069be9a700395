"""Pictures of matrices of weights, for every trainer: sheets and scales, numbers, charts.

Layers, heads, tokens, rows and columns that a picture or a page names are counted from 1; code counts from 0.
"""
