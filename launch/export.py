"""The trained policy as folders that other tools load."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp

from jaxcredit.update import TrainState
from launch.learn import Setup
from models import hf, lora, peft


def export(setup: Setup, state: TrainState, folder: Path) -> None:
    """Writes the policy (adapters merged) and its tokenizer in Hugging Face's layout.

    Adapters are also written alone, in PEFT's layout, to ``adapters`` beside ``folder``.
    """
    parts, source = setup.parts, setup.config.policy
    # Merged in float32: an adapter's change may be smaller than the base's rounding.
    exact = dataclasses.replace(parts.policy, dtype="float32")
    weights, adapters = exact.weights(state.trainable, parts.frozen)
    if adapters is not None:
        weights = lora.merge(weights, adapters)
        with _replacing(folder.with_name("adapters")) as partial:
            base = None if source.path is None else str(source.path)
            peft.save_adapters(partial, parts.policy.config, adapters, base=base)
    with _replacing(folder) as partial:
        hf.save_policy(partial, parts.policy.config, weights, jnp.float32)
        parts.chat.tokenizer.save_pretrained(partial)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes ``folder``'s place when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
