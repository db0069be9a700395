"""The paper's figures of vision models: a file for every family, in the table of `families`. `subjects` loads models
and images, `maps` computes W, `measures` reads numbers off it, and `sheet` lays out the pictures."""
