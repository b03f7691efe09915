"""The configuration file of `rollouts run`: reading and checking it, and making the objects that it describes."""
