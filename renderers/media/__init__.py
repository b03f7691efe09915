"""Images, video and sound are checked against a policy, read, decoded, and stored by their digest."""
