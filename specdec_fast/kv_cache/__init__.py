"""The paged KV cache: pages, how rows are laid out on them, and the cache that a Hugging Face model sees."""
