"""The ``"ngram"`` and ``"ngram-trie"`` drafters: prompt lookup, no second model."""
