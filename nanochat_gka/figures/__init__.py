"""The paper's figures for language models. `maps` computes W, `subjects` what is drawn; the other files draw it."""
