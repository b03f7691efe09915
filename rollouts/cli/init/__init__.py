"""The command `rollouts init`."""
