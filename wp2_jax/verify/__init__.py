"""Golden tensors of the published implementation, and the checks that this one gives the same numbers."""
