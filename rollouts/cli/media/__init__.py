"""`rollouts media`: list, verify and export the media of a store or a trajectory file."""
