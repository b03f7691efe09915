"""`rollouts view`: the episodes of a trajectory file in a browser."""
