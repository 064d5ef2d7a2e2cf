"""The engine: it turns prompts into requests, runs steps, and returns outputs."""
