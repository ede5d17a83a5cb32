"""Controls of a world: actions, captions, pictures and the input file, from what people write to arrays.

Everything here runs on the host in numpy except the two resizers of `images`, which are jax functions.
Errors are subclasses of `errors.ControlError`.
"""
