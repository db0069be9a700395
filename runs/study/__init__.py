"""The controlled study: GKA and softmax attention side by side on one text, every side tuned."""
