"""Test-wide settings. JAX reads its platform and device count once, so they are set here."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for name, value in {
    # Eight simulated devices, so that every sharded path is tested without an accelerator.
    "xla_force_host_platform_device_count": 8,
    # Their collectives wait for each other forever unless they keep one order.
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Tests compile a lot and run each program once or twice.
    "xla_backend_optimization_level": 0,
}.items():
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()

# Examples are the same on every machine: a failure elsewhere is a failure here.
settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("project")
