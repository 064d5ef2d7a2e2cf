"""Trees of draft tokens: static ones, growing ones, and the rows of a forward that verifies them."""
