"""Eight simulated CPU devices for every test; 64-bit types stay off, as in most users' programs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
