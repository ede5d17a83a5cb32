"""The full size: WorldPlay2 on the Wan2.2 A14B experts, every stage at the paper's settings where it states them.

    wp2 plan --config experiments/a14b.py:teacher_forcing --target v5p:4x4x8

The argument is STAGE. The first two stages are not trained: they stand for the Wan2.1 autoencoder, the Wan2.2 experts
and the UMT5 encoder, which `wp2 convert import` reads. The data section holds placeholders.
"""

from typing import Any

from ml_collections import ConfigDict

STAGES = ("autoencoder", "base", "action", "memory_1", "memory_2", "teacher_forcing", "pdd", "stable_forcing")
# Steps are ours: the paper is silent.
STEPS = {
    "autoencoder": 0,
    "base": 0,
    "action": 20_000,
    "memory_1": 5_000,
    "memory_2": 20_000,
    "teacher_forcing": 10_000,
    "pdd": 3_000,
    "stable_forcing": 1_000,
}
# Lengths are latent frames: the teacher trains on 32 of them, the student on 16.
OBJECTIVES = {
    "autoencoder": dict(pictures=17, regulariser=0.0),
    "base": dict(target=32, dropout=0.1, image_dropout=0.0),
    "action": dict(target=32, dropout=0.1, image_dropout=0.0),
    "memory_1": dict(drawn=32, history=320, dropout=0.1, rank=128),
    "memory_2": dict(target=32, history=288, change_weight=1.0, dropout=0.1),
    "teacher_forcing": dict(target=16, history=304, change_weight=1.0, dropout=0.1),
    "pdd": dict(target=16, history=304, change_weight=1.0, dropout=0.0, guidance=3.5, solver="euler"),
    "stable_forcing": dict(
        chunks=80, clip=32, guidance=3.5, fake_updates=5, fake_learning_rate=4e-7, memory_grad="none"
    ),
}


def get_config(arg: str = "") -> ConfigDict:
    """The config of a stage; without a stage, that of the first (the curriculum asks for each in turn)."""
    stage = arg or STAGES[0]
    if stage not in STAGES:
        raise ValueError(f"experiments/a14b.py has no stage {stage!r}; stages: {', '.join(STAGES)}")
    c: Any = ConfigDict()
    c.stage, c.stages, c.seed = stage, STAGES, 0
    # Sizes that are left out are the published ones: inference/world.py, models/dit.py, models/umt5.py.
    c.world = ConfigDict(dict(height=448, width=832))
    c.model = ConfigDict(dict(dtype="bfloat16", remat="full"))
    c.autoencoder = ConfigDict(dict(kind="wan"))
    c.text = ConfigDict(dict())
    c.data = ConfigDict(dict(directory="data", seed=0, clips=100_000, maps=5_000, test_maps=50, latents=320))
    c.data.update(dict(yaw_degrees=3.0, pitch_degrees=1.0, step=4.0))
    c.data.update(dict(event=0.3, event_density=0.0, event_environment=0.0))
    student = stage == "stable_forcing"
    c.optim = ConfigDict(
        dict(learning_rate=2e-6 if student else 1e-5, schedule="constant", warmup=0 if student else 500, steps=0)
    )
    c.optim.update(dict(weight_decay=0.01, b1=0.0 if student else 0.9, b2=0.999, clip=1.0, method="adamw"))
    c.train = ConfigDict(dict(steps=STEPS[stage], batch=64, accumulate=1, ema_decay=0.99, log_every=10))
    c.train.update(dict(evaluate_every=500, sample_every=1000, checkpoint_every=250, evaluate_batches=4, keep=2))
    c.train.quick_compile = False
    # All chips along fsdp; tokens are cut over seq where a chip cannot hold a sample's.
    c.mesh = ConfigDict(dict(data=1, fsdp=-1, seq=1, tensor=1))
    c.objective = ConfigDict(OBJECTIVES[stage])
    return c
