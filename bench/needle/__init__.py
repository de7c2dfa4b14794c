"""A small model with a 128K context that only retrieves, and documents that test long contexts."""
