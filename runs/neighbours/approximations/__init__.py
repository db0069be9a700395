"""Approximations of Gaussian kernel attention for long sequences: how wrong they are, and how fast.

Nothing here is a part of the operator. `forms.py` is the table of what is compared; every form has its reference and
its equation there.
"""
