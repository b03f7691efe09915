"""Samples packed into rows of a token budget, and the rows divided among ranks."""
