"""`rollouts render`: a conversation file as tokens, with the owner of each token."""
