"""Learned step signals and the tokens that they are read at.

A step head gives a number, or two, at every token of a row, and counts at one token per step:

    "after":   the last action token of the step, in the state after it
    "before":  the first action token of the step, in the state in which it was chosen

Everything here moves between that one token and the step, on the host.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxcredit import losses
from jaxcredit.episodes import SIGNAL_AXES, EpisodeBatch, Kind, as_fields

STEP_HEADS = {
    "predicted_return": "after",
    "predicted_progress": "after",
    "promise": "after",
    "q_value": "after",
    "v_value": "before",
}


def outputs(name: str) -> tuple[int, ...]:
    """Shape of what a head gives at a token: () or (2,)."""
    return tuple(int(axis) for axis in SIGNAL_AXES[name].split()[2:])


def read_tokens(batch: EpisodeBatch, name: str) -> np.ndarray:
    """[B,T] bool: the one token of each step at which the head is read.

    Only tokens that the policy sampled are asked; a step without any has no such token.
    """
    step, episode = np.asarray(batch.step), np.asarray(batch.episode)
    action = np.asarray(batch.trainable) & (np.asarray(batch.kind) == Kind.ACTION)
    places = np.flatnonzero(action & (step >= 0) & (episode >= 0))
    if STEP_HEADS[name] == "after":
        places = places[::-1]  # np.unique keeps the first of equals
    steps = episode.ravel()[places] * batch.step_mask.shape[1] + step.ravel()[places]
    read = np.zeros(step.size, bool)
    read[places[np.unique(steps, return_index=True)[1]]] = True
    return read.reshape(step.shape)


def to_steps(batch: EpisodeBatch, read: np.ndarray, per_token: np.ndarray) -> np.ndarray:
    """[N,K,...] what stands at each step's token; 0 for a step without one."""
    out = np.zeros((*batch.step_mask.shape, *per_token.shape[2:]), per_token.dtype)
    out[np.asarray(batch.episode)[read], np.asarray(batch.step)[read]] = per_token[read]
    return out


def to_tokens(batch: EpisodeBatch, read: np.ndarray, per_step: np.ndarray) -> np.ndarray:
    """[B,T,...] the step's number at its token, 0 elsewhere."""
    out = np.zeros((*read.shape, *per_step.shape[2:]), per_step.dtype)
    out[read] = per_step[np.asarray(batch.episode)[read], np.asarray(batch.step)[read]]
    return out


def step_weights(
    batch: EpisodeBatch, read: np.ndarray, episodes: np.ndarray, reduce: str
) -> np.ndarray:
    """[B,T] weights of the head's loss over a mini-batch: ``losses.loss_weights`` of steps that
    are one token long, so the mean over steps, or over episodes' means."""
    single = dataclasses.replace(batch, **as_fields({"trainable": read}))
    return losses.loss_weights(single, np.ones(read.shape), episodes, reduce)
