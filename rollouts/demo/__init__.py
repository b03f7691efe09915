"""The demonstration behind `rollouts demo`: a tiny vision-language model learns to read digits."""
