"""Instructions, and the memory of the buffers that they read and write."""
