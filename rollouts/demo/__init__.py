"""`rollouts demo` trains a tiny vision-language model to read digits."""
