"""The command `rollouts` has a file or a folder for each subcommand."""
