"""The project that `rollouts demo` writes and trains: a tiny vision-language model learns to read digits."""
