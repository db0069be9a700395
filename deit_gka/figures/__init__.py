"""The paper's figures of vision models: a file for every family. `maps` computes W, `measures` what is read off
it, `sheet` is what the pictures share; the others draw."""
