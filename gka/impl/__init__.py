"""Implementations of the operator, one file each. They never import one another; `api.py` chooses."""
