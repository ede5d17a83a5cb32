"""What things cost: `wp2 bench` times the parts of a world, beside PyTorch's modules where they cover them."""
