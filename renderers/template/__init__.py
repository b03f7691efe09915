"""A chat template is run, and the origin of every character that it prints is traced."""
