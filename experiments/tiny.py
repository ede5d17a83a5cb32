"""The tiny world: every stage at a size that two CPU cores train.

    wp2 curriculum --config experiments/tiny.py --workdir runs/tiny
    wp2 train --config experiments/tiny.py:memory_2 --workdir runs/tiny
    wp2 curriculum --config experiments/tiny.py:quick --workdir runs/quick     (minutes; shows that all works)

The argument is STAGE, "quick", or "quick-STAGE". Sizes are numbers only: the code is that of the full size.
"""

from typing import Any

from ml_collections import ConfigDict

STAGES = (
    "autoencoder",
    "base",
    "action",
    "events",
    "memory_1",
    "memory_2",
    "teacher_forcing",
    "pdd",
    "stable_forcing",
)

# Of each stage: steps of the full tiny recipe and of the quick one, then their learning rates.
STEPS = {
    "autoencoder": (1200, 100),
    "base": (450, 120),
    "action": (4400, 1600),
    "events": (2000, 100),
    "memory_1": (200, 30),
    "memory_2": (800, 300),
    "teacher_forcing": (900, 400),
    "pdd": (250, 40),
    "stable_forcing": (60, 4),
}
RATES = {
    "autoencoder": (3e-4, 5e-4),
    "base": (3e-3, 3e-3),
    "action": (3e-3, 3e-3),
    "events": (1.5e-3, 1.5e-3),
    "memory_1": (1e-3, 1e-3),
    "memory_2": (1.5e-3, 2e-3),
    "teacher_forcing": (1.5e-3, 2e-3),
    "pdd": (2e-4, 2e-4),
    "stable_forcing": (2e-5, 2e-5),
}
# Stages without memory: their samples are short, so that a step affords more of them.
SHORT = ("autoencoder", "base", "action", "events")
# Stages that move the backbone's matrices by Muon: the quick action stage came to a held-out loss of 0.101 in 1500
# steps and 184 s; with AdamW to 0.122 in as many steps, and to 0.111 in 2600 steps and 173 s (two cores, one run each).
MATRICES = ("base", "action", "events", "memory_2", "teacher_forcing", "pdd")
# Stages that learn what events do. Little text is needed before them, and its weights have shrunk: they learn faster
# than the others.
TEXT = ("events", "memory_2", "teacher_forcing")


def get_config(arg: str = "") -> ConfigDict:
    """The config of a stage; without a stage, that of the first (the curriculum asks for each in turn)."""
    quick = arg == "quick" or arg.startswith("quick-")
    stage = (arg.removeprefix("quick").removeprefix("-") if quick else arg) or STAGES[0]
    if stage not in STAGES:
        raise ValueError(f"experiments/tiny.py has no stage {stage!r}; stages: {', '.join(STAGES)}, quick, quick-STAGE")

    c: Any = ConfigDict()
    c.stage = stage
    # The quick recipe shows that all works; events take more steps than it has.
    c.stages = tuple(name for name in STAGES if not quick or name != "events")
    c.seed = 0

    c.world = ConfigDict(
        dict(height=64, width=64, chunk=4, sink=1, temporal=1, boundary=None, solver="unipc", steps=40, shift=5.0)
    )
    c.world.update(dict(guidance=(1.5,), intervals=(128,), blocks=(4,), pdd_shift=7.0, text_len=64))
    c.world.negative_prompt = "nothing"
    # Four latents a side in a memory token, as many as the low-resolution twin has in one of its.
    memory = dict(widths=(32, 32, 64, 64, 96, 96, 96), spatial_down=(1, 1, 0, 0, 0, 0), attention_heads=4)
    # Unrolled layers compile longer and run faster: it pays where a program runs thousands of times.
    c.model = ConfigDict(
        dict(
            dim=192,
            num_heads=3,
            num_layers=4,
            ffn_dim=512,
            freq_dim=256,
            patch=1,
            text_dim=64,
            text_len=64,
            memory=memory,
            remat="none",
            unroll=1 if stage == "stable_forcing" else 4,
        )
    )
    c.autoencoder = ConfigDict(
        dict(kind="tiny", encoder_width=64, decoder_widths=(96, 64, 64, 64), blocks=1, patch=4, shortcut=True)
    )
    c.text = ConfigDict(
        dict(vocab_size=640, dim=64, attention_dim=64, ffn_dim=128, num_heads=4, num_layers=2, num_buckets=32)
    )

    # Recorded by `wp2 curriculum` where the folder does not hold it yet.
    c.data = ConfigDict(dict(directory="data", seed=0, clips=1280, maps=80, test_maps=8, latents=40))
    c.data.update(dict(yaw_degrees=5.625, pitch_degrees=2.8125, step=4.0))
    c.data.update(dict(event=0.3, event_density=0.0, event_environment=0.0))
    if not quick and stage == "events":
        # Clips of one interval: most hold an event, which begins with the third latent frame.
        c.data.update(dict(directory="data_short", seed=2, clips=4240, latents=12, event=3.0))
        c.data.update(dict(event_density=0.9, event_environment=0.6))
    if not quick and stage not in SHORT:
        # As many pictures in clips of 40 s on other maps: ways back that are long, and far positions.
        c.data.update(dict(directory="data_long", seed=1, clips=320, latents=160, event=0.6))
        c.data.update(dict(event_density=0.9, event_environment=0.6))

    c.optim = ConfigDict(
        dict(learning_rate=RATES[stage][quick], schedule="cosine", warmup=50, steps=0, weight_decay=0.01)
    )
    c.optim.update(dict(b1=0.9, b2=0.99, clip=1.0, method="muon" if stage in MATRICES else "adamw"))
    if stage in TEXT and not quick:
        c.optim.rates = (("cross_attention", 4.0),)
    batch = 8 if quick or stage in SHORT else 4
    c.train = ConfigDict(dict(steps=STEPS[stage][quick], batch=batch, ema_decay=0.99, log_every=20, evaluate_every=250))
    c.train.update(
        dict(sample_every=1000, checkpoint_every=500, evaluate_batches=4, keep=1, accumulate=1, quick_compile=False)
    )
    c.mesh = ConfigDict(dict(data=1, fsdp=-1, seq=1, tensor=1))

    c.objective = ConfigDict(OBJECTIVES[stage])
    if quick:
        _quick(c)
    return c


# What is particular to a stage. Lengths are latent frames. Targets begin this much likelier where the caption changes.
OBJECTIVES = {
    "autoencoder": dict(pictures=9, regulariser=0.3),
    "base": dict(target=4, dropout=0.1, image_dropout=0.0),
    "action": dict(target=4, dropout=0.1, image_dropout=0.0),
    "events": dict(target=12, dropout=0.1, image_dropout=0.5),
    "memory_1": dict(drawn=8, history=64, dropout=0.1, rank=16),
    "memory_2": dict(target=8, history=152, change_weight=50.0, dropout=0.1),
    "teacher_forcing": dict(target=8, history=152, change_weight=50.0, dropout=0.1),
    "pdd": dict(target=8, history=152, change_weight=8.0, dropout=0.0, guidance=1.5, solver="euler"),
    "stable_forcing": dict(
        chunks=10, clip=8, guidance=1.5, fake_updates=5, fake_learning_rate=4e-6, memory_grad="none"
    ),
}


def _quick(c: Any) -> None:
    """Smaller and shorter: the whole curriculum in minutes."""
    c.model.update(dict(num_layers=3, ffn_dim=384, patch=2, unroll=3 if c.stage == "action" else 1))
    c.model.memory.update(dict(widths=(16, 16, 32, 32, 48, 48, 48), spatial_down=(1, 1, 1, 0, 0, 0)))
    c.data.update(dict(clips=200, maps=20, test_maps=2, latents=24))
    c.train.update(dict(sample_every=10**6, checkpoint_every=1000, evaluate_batches=2))
    c.train.update(dict(evaluate_every=max(1, c.train.steps // 6), log_every=max(1, c.train.steps // 60)))
    c.optim.update(dict(warmup=20))
    if c.stage == "autoencoder":
        c.train.batch = 6
    if "change_weight" in c.objective:
        c.objective.change_weight = 1.0
    if "history" in c.objective:
        c.objective.history = 8 if c.stage == "teacher_forcing" else 16
    if c.stage == "stable_forcing":
        c.train.update(dict(log_every=1, batch=2, evaluate_every=0, quick_compile=True))
        c.optim.warmup = 0
        c.objective.update(dict(chunks=6))
