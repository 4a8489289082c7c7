"""Test-wide settings. JAX reads its platform and device count once, so they are set here."""

from __future__ import annotations

import os

import pytest
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

pytest_plugins = ["small_run"]

# Files go to processes whole. The longest go first, so that none is left for the end alone.
LONGEST = ("test_train.py", "test_train_methods.py", "test_models_sharding.py", "test_engine.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
