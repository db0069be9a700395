"""Approximations of Gaussian kernel attention for long sequences: how wrong they are, and how fast. None is a part of
the operator. `forms.py` has the table of what is compared.
"""
