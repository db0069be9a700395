"""timm's vision transformers with our attention, and their files."""
