"""Constants that the fixtures of the bundled pair share with the tests."""

MAX_NEW_TOKENS = 40
