"""`rollouts render` prints the tokens of a conversation."""
