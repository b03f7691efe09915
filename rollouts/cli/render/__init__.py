"""`rollouts render`: show a conversation file as tokens, with the owner of each token."""
