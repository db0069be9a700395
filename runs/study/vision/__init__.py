"""The study's question 7: spatial head offsets and hybrids in vision transformers."""
