"""What is handed on: synthetic data sets and generators, each with a card and checksums."""
