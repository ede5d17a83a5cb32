"""WorldPlay2 in JAX: an interactive video world model, its training curriculum and its real-time path."""
