"""A bridge extends a sampled prefix to the prompt of the next turn, where the template allows it."""
