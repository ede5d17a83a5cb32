"""What is minimised, one file an objective: `loss(params, batch, frozen, key, *, static...) -> (loss, metrics)`.

Each is a free, pure function. Modules, sizes and callables are keyword arguments, bound with `functools.partial`; trees
come as arguments:

    params   {"experts": {name: tree}} and, in the base stage, "text"; see each file for others
    frozen   "text": the text encoder where it is not trained; "null_context" [1, S, text_dim], the encoded negative
             prompt, or (while the encoder trains) "null_ids" [1, S] int32; "max_history" int32 [], the longest history
             the curriculum allows at present, in latent frames; trees of other models
    metrics  scalars; NaN where this batch measured nothing
"""
