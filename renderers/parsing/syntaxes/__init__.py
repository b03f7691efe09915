"""A syntax reads tool calls whose arguments are written as JSON, as elements or as literals."""
