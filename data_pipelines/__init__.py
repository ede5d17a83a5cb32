"""Recording, latent cache and loaders: everything between a world and a training batch."""
