"""The command `rollouts render`."""
