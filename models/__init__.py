"""Networks and what they mean; imports nothing else of this project."""
