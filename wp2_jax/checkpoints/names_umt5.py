"""The published names of the text encoder's parameters (the umt5-xxl encoder file of the Wan models)."""

from wp2_jax.checkpoints.torch_names import LINEAR, Rule

_LINEARS = {
    "attention/q": "attn.q",
    "attention/k": "attn.k",
    "attention/v": "attn.v",
    "attention/out": "attn.o",
    "ffn/gate": "ffn.gate.0",
    "ffn/up": "ffn.fc1",
    "ffn/down": "ffn.fc2",
}
_PLAIN = {
    "attention_norm/scale": "norm1",
    "ffn_norm/scale": "norm2",
    "attention/position_bias": "pos_embedding.embedding",
}


def rules(num_layers: int) -> list[Rule]:
    """The table for an encoder of `num_layers` layers."""
    return [
        Rule("token_embedding/embedding", "token_embedding.weight"),
        Rule("norm/scale", "norm.weight"),
        *(
            Rule(f"blocks/{ours}/kernel", f"blocks.{{i}}.{theirs}.weight", LINEAR, num_layers)
            for ours, theirs in _LINEARS.items()
        ),
        *(
            Rule(f"blocks/{ours}", f"blocks.{{i}}.{theirs}.weight", layers=num_layers)
            for ours, theirs in _PLAIN.items()
        ),
    ]
