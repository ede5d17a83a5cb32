"""Checkpoints: Orbax for training, tables of names for published weights. Trees and names only, no models."""
