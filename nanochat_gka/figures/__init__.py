"""The paper's figures for language models: a file for every family. `maps` computes W, `measures` what is read off
it; the others draw."""
