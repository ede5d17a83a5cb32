"""A checkpoint's backbone in eight bits, as a packed folder that plays like the one it was made from."""

import os
import shutil
from pathlib import Path

from wp2_jax.checkpoints import trained
from wp2_jax.inference import load, precision


def quantize(source: load.Source, output: str | os.PathLike[str], name: str) -> tuple[Path, list[precision.Loss]]:
    """Write the stage of `source` in the preset `name`, and packed what it needs besides, into `output`.

    Returns the file of the stage and what eight bits cost, matrix by matrix.

    Raises:
      ValueError: a preset without eight bits, or a checkpoint that has them already.
    """
    chosen, output = precision.PRESETS.get(name, precision.Precision()), Path(output)
    forms = [other for other, made in precision.PRESETS.items() if made.form and not made.activations]
    if name not in forms:
        raise ValueError(f"precision {name!r}: a checkpoint can be written in {' or '.join(forms)}")
    if source.stored != "full":
        raise ValueError(f"{source.folder} is in {source.stored} already: give the checkpoint it was made from")
    experts = trained.load_params(source.folder, source.role, ema=True, step=source.step)
    made = {expert: precision.cast(tree, chosen) for expert, tree in experts.items()}
    metadata = trained.load_metadata(source.folder, source.step) | {"step": source.step}
    roles, apart = {source.role: made}, [("autoencoder", "autoencoder")]
    if source.text_stage == source.stage:
        roles["text"] = trained.load_params(source.folder, "text", ema=True, step=source.step)
    else:
        apart.append((source.text_stage, "text"))
    path = trained.write_packed(output / source.stage, roles, metadata, precision=name)
    for stage, role in apart:
        trained.pack(source.workdir / stage, output / stage, (role,))
    shutil.copy(source.workdir / load.TOKENIZER, output / load.TOKENIZER)
    return path, [loss for expert in experts for loss in precision.losses(expert, experts[expert], made[expert])]
