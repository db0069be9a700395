"""Sizes of the paper's vision models: in make's targets, and in timm's names."""

SIZE_NAMES = {"ti": "tiny", "s": "small", "b": "base"}
