"""The paper's figures of vision models: a table of them in `families`. `subjects` loads models and images, `maps`
computes W and reads numbers off it, and `sheet` lays out the pictures."""
