"""The `rollouts` command."""
