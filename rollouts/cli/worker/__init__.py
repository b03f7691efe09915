"""The commands `rollouts worker` and `rollouts keys`."""
