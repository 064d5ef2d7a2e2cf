"""What the fixtures of the bundled pair and the tests agree upon."""

MAX_NEW_TOKENS = 40
