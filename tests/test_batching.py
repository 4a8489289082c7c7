"""Episodes to arrays, checked token by token against the episodes themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from episode_cases import random_episodes

from jaxcredit.batching import (
    batch_episodes,
    episode_rows,
    length_slices,
    row_lengths,
    take_rows,
)
from jaxcredit.episodes import Kind, Status
from models.score import buckets_for


def rows_of(episode):
    """The expected rows, built id by id: (token, kind, step, logp, trainable)."""
    rows, row = [], []
    for k, step in enumerate(episode.steps):
        if episode.context == "window":
            row = []
            rows.append(row)
        elif k == 0:
            rows.append(row)
        start, end = step.observation_span
        for i, token in enumerate(step.context_ids):
            observation = start <= i < end
            kind = Kind.OBSERVATION if observation else Kind.CONTEXT
            row.append((token, kind, k - 1 if observation else k, 0.0, False))
        for token, logp, sampled in zip(
            step.response_ids, step.behaviour_logp, step.sampled, strict=True
        ):
            row.append((token, Kind.ACTION, k, logp, sampled))
    return rows


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_every_token_knows_where_it_comes_from(context):
    episodes = random_episodes(1, context=context)
    batch = batch_episodes(episodes, max_steps=6, length_multiple=16)
    expected = [(i, row) for i, e in enumerate(episodes) for row in rows_of(e)]
    assert batch.tokens.shape[0] == len(expected)
    assert batch.tokens.shape[1] % 16 == 0
    for b, (i, row) in enumerate(expected):
        n = len(row)
        tokens, kinds, steps, logps, sampled = map(list, zip(*row, strict=True))
        assert batch.tokens[b, :n].tolist() == tokens
        assert batch.kind[b, :n].tolist() == kinds
        assert batch.step[b, :n].tolist() == steps
        np.testing.assert_array_equal(batch.behaviour_logp[b, :n], np.float32(logps))
        assert batch.trainable[b, :n].tolist() == sampled
        assert (batch.episode[b, :n] == i).all()
        assert batch.position[b, :n].tolist() == list(range(n))
        assert (batch.kind[b, n:] == Kind.PAD).all()
        assert (batch.episode[b, n:] == -1).all()
        assert not batch.trainable[b, n:].any()
        assert not batch.segment[b, n:].any()


def test_tables():
    episodes = random_episodes(2)
    batch = batch_episodes(episodes, max_steps=7)
    for i, e in enumerate(episodes):
        k = len(e.steps)
        assert batch.n_steps[i] == k
        assert batch.step_mask[i].tolist() == [True] * k + [False] * (7 - k)
        assert batch.progress[i, 1 : k + 1].tolist() == [np.float32(s.progress) for s in e.steps]
        assert (batch.progress[i, k + 1 :] == batch.progress[i, k]).all()
        assert batch.action_valid[i, :k].tolist() == [s.valid for s in e.steps]
        for j, other in enumerate(episodes):  # equal ids exactly for equal states of one task
            for a, s in enumerate(e.steps):
                for b, t in enumerate(other.steps):
                    same = e.group == other.group and s.state == t.state
                    assert (batch.state[i, a] == batch.state[j, b]) == same


def test_pad_id_equal_to_a_stop_id_changes_nothing():
    episodes = random_episodes(3)
    zero = batch_episodes(episodes, max_steps=6, pad_id=0)
    seven = batch_episodes(episodes, max_steps=6, pad_id=7)
    for name in ("kind", "trainable", "segment", "step", "episode"):
        np.testing.assert_array_equal(getattr(zero, name), getattr(seven, name))


def test_hindsight_rows_keep_the_sampled_ids():
    episode = random_episodes(4, groups=1, size=1, steps=4)[0]
    (plain,), (hindsight,) = episode_rows(episode), episode_rows(episode, hindsight=True)
    assert len(hindsight.tokens) == len(plain.tokens) + 2
    np.testing.assert_array_equal(plain.tokens[plain.sampled], hindsight.tokens[hindsight.sampled])
    first = episode.steps[0].hindsight_ids
    np.testing.assert_array_equal(hindsight.tokens[: len(first)], first)


def test_spoiled_episodes_have_no_weight_and_may_be_empty():
    episodes = random_episodes(5, groups=1, size=3)
    episodes[1] = dataclasses.replace(episodes[1], steps=(), status=Status.ENV_ERROR)
    batch = batch_episodes(episodes, max_steps=6)
    assert batch.weight.tolist() == [1, 0, 1]
    assert set(np.unique(batch.episode)) == {-1, 0, 2}


def test_errors_name_the_episode_and_the_number():
    episodes = random_episodes(6, groups=2, size=2, steps=5)
    with pytest.raises(ValueError, match=r"task 0.*5 steps.*max_steps=4"):
        batch_episodes(episodes, max_steps=4)
    with pytest.raises(ValueError, match=r"group 1 has 1 episodes, expected 2"):
        batch_episodes(episodes[:3], max_steps=5, groups=2)
    with pytest.raises(ValueError, match="no episodes"):
        batch_episodes([], max_steps=5)


def household_lengths(rng, n):
    """Rows as ALFWorld makes them: a prompt, then 5 to 50 turns of a reply and an observation."""
    solved = rng.random(n) < 0.6
    turns = np.where(solved, rng.integers(5, 30, n), 50)
    return np.array(
        [
            rng.integers(250, 500) + (rng.integers(15, 60, t) + rng.integers(15, 90, t)).sum()
            for t in turns
        ]
    )


@pytest.mark.parametrize(("n", "tokens"), [(64, 8192), (128, 8192), (512, 8192), (512, 32768)])
def test_at_most_15_percent_of_a_slice_is_padding(n, tokens):
    for seed in range(5):
        lengths = household_lengths(np.random.default_rng(seed), n)
        slices = list(length_slices(lengths, tokens=tokens, buckets=buckets_for(8192, multiple=64)))
        computed = sum(part.width * len(part.rows) for part in slices)
        assert 1 - lengths.sum() / computed <= 0.15
        assert len({part.width for part in slices}) <= 16


def test_windows_are_padded_little_too():
    lengths = np.random.default_rng(0).integers(180, 900, 1500)
    slices = list(length_slices(lengths, tokens=8192, buckets=buckets_for(1024, multiple=64)))
    computed = sum(part.width * len(part.rows) for part in slices)
    assert 1 - lengths.sum() / computed <= 0.15


def test_bucket_widths_grow():
    assert buckets_for(512, multiple=64) == (64, 128, 192, 256, 320, 384, 512)
    assert buckets_for(500, multiple=64)[-1] == 512
    assert buckets_for(32768, multiple=128)[-1] == 32768
    assert len(buckets_for(32768, multiple=128)) <= 26


def test_rows_are_cut_in_multiples():
    slices = list(length_slices(np.full(10, 60), tokens=320, buckets=(64,), multiple=4))
    assert [(len(part.rows), part.n) for part in slices] == [(4, 4), (4, 4), (4, 2)]
    (part,) = length_slices(np.full(3, 60), tokens=64, buckets=(64,), multiple=8)
    assert len(part.rows) == 8


def test_slices_cover_every_row_once_in_few_shapes():
    batch = batch_episodes(random_episodes(7, groups=5), max_steps=6, length_multiple=8)
    lengths = row_lengths(batch)
    seen, shapes = [], set()
    for part in length_slices(lengths, tokens=200, buckets=(32, 64, 96)):
        fields = take_rows(batch, part)
        shapes.add(fields["tokens"].shape)
        assert fields["tokens"].shape == (200 // part.width, part.width)
        assert (fields["segment"][: part.n].sum(1) == lengths[part.rows[: part.n]]).all()
        assert not fields["segment"][part.n :].any()
        assert (fields["episode"][part.n :] == -1).all()
        seen.extend(part.rows[: part.n].tolist())
    assert sorted(seen) == list(range(len(lengths)))
    assert len(shapes) <= 3
    with pytest.raises(ValueError, match="larger bucket"):
        list(length_slices(lengths, tokens=200, buckets=(16,)))
