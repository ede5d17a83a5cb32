"""Training: state, optimisers, one update, and the loop on the host. It knows no particular objective."""
