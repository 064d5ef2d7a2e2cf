"""What several benchmarks share: pairs, prompts, clocks, references, reports."""
