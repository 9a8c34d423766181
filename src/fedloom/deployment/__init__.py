"""Real federations: who is in one, keys, what a silo agrees to, and the processes that carry the rounds."""
