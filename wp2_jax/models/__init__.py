"""Pure linen modules: the backbone, its memory, the autoencoders and the text encoder."""
