"""Where it runs: engines carry out the rounds of an experiment."""
