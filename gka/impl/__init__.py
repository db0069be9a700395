"""Implementations of the operator, a file or a folder each. They never import one another; `dispatch` chooses."""
