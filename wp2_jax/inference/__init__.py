"""Streaming generation: one step gives one chunk, for generation, rollouts in training and play alike."""
