"""The forward pass of a transformers model has its media placed by range, for local engine and trainer."""
