"""The processes that compute one sharded model: sums and concatenations over them, in one order."""
