"""Reading a trajectory file that may be damaged or hostile, for the commands that show it."""
