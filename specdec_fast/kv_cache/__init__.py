"""The paged KV cache: pages, the layout of rows on pages, and the cache object for a Hugging Face model."""
