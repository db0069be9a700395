"""Worked examples: models of other libraries with GKA, on data that anybody has."""
