"""The paper's figures of vision models: a file for every family, in the table of `families`. `subjects` says what is
drawn, `maps` computes W, `measures` what is read off it, `groups` and `sheet` are what the pictures share."""
