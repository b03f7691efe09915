"""Text and tables on a terminal and in a pipe, for the commands."""
