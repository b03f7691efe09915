"""Commands print text and tables for a terminal or a pipe."""
