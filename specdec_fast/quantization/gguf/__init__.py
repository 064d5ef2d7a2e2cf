"""GGUF files, as llama.cpp writes them: the container, and the types of its tensors."""
