"""The paper's figures for language models. `maps` computes W, `subjects` prepares models; the others draw."""
