"""The command `rollouts run`."""
