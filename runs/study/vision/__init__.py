"""The study's question 6: spatial head offsets and hybrids in vision transformers."""
