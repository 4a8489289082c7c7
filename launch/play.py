"""Plays one game and shows what happened: the transcript, and the step graph behind the credit."""

from __future__ import annotations

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from envs.chat import ChatFormat
from envs.engine import EngineError
from envs.protocol import Task
from envs.rollout import Job, Sampler
from jaxcredit import batching, credit
from jaxcredit.episodes import Episode, EpisodeBatch
from launch import assemble, games, sampling
from launch.config import ROW_MULTIPLE, TrainConfig
from launch.errors import UserError, user_errors
from models.score import ScoreConfig, score


def main(config: TrainConfig, policy: Path | None, task: str | None, out: Path) -> None:
    """``python -m launch play CONFIG --out FOLDER [--policy FOLDER] [--task ID]``.

    Writes ``transcript.md`` and, for a conversation that was sampled here, ``step_graph.png``: a
    server does not tell where its policy looked.
    """
    if out.exists():
        raise UserError(f"--out: {out} exists; name a new folder")
    if policy is not None:
        source = config.policy.model_copy(update={"path": policy, "init": None})
        config = config.model_copy(update={"policy": source})
    single = config.model_copy(update={"rollout": config.rollout.model_copy(update={"slots": 1})})
    temperature = config.evaluate.temperature
    sampler: Sampler
    graph = None
    if config.engine is not None:
        player = assemble.make_player(config)
        sampler = sampling.make_engine(player, single, temperature=temperature)
    else:
        parts = assemble.build(config, critic=False)
        layers = assemble.step_graph_layers(config.policy, parts.policy.config.num_hidden_layers)
        graph = functools.partial(draw, parts, layers)
        player = parts.player
        sampler = sampling.make_sampler(parts, parts.trainable, single, temperature=temperature)
    games.ensure(config.env)
    chosen = pick(config, task)
    workers = config.env.model_copy(update={"workers": 1})
    with (
        assemble.open_pool(workers, config.prompt) as pool,
        user_errors("engine", EngineError),
        sampling.closing(sampler),
    ):
        (episode,) = player.collect(sampler, pool, [Job(chosen, 0)])
    batch = batching.batch_episodes(
        [episode], max_steps=max(2, len(episode.steps)), length_multiple=ROW_MULTIPLE
    )
    out.mkdir(parents=True)
    share = None
    if graph is not None and episode.context == "conversation":
        share = graph(batch, episode, out / "step_graph.png")
    (out / "transcript.md").write_text(transcript(player.chat, chosen, batch, episode, share))
    print(f"{episode.status.name} after {len(episode.steps)} steps; see {out}/transcript.md")


def pick(config: TrainConfig, task: str | None) -> Task:
    """The named task, or the first of the first evaluation split."""
    tasks = assemble.tasks_of(config.env, config.evaluate.splits[0])
    if task is None:
        return tasks[0]
    found = [t for t in tasks if task in t.id]
    if not found:
        raise UserError(f"--task: no task of {config.evaluate.splits[0]} contains {task!r}")
    return found[0]


def draw(
    parts: assemble.Parts,
    layers: tuple[int, ...],
    batch: EpisodeBatch,
    episode: Episode,
    image: Path,
) -> np.ndarray:
    """Draws G_AA, G_AO (mean over layers) and AttnSR's share of each step; returns the shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = batch.tokens.shape[1]
    signals = score(
        parts.policy,
        parts.trainable,
        parts.frozen,
        batch,
        ScoreConfig(buckets=(width,), tokens=width, layers=layers),
        step_graph=True,
        head=False,
    )
    graph = jnp.asarray(signals.step_graph)
    found = credit.allocate(batch, graph, credit.AttentionConfig())
    share = np.asarray(found.share)[0, : len(episode.steps)]
    mean = np.asarray(graph[0].mean(axis=0))
    names = [f"{k + 1}. {step.action or '(none)'}" for k, step in enumerate(episode.steps)]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5.5), layout="constrained")
    for axis, part, title in zip(
        axes, mean, ("G_AA: to messages", "G_AO: to observations"), strict=False
    ):
        shown = np.where(np.tri(len(part), k=-1, dtype=bool), part, np.nan)
        picture = axis.imshow(shown[: len(names), : len(names)], cmap="viridis", vmin=0)
        axis.set(title=f"{title} (mean of layers {list(layers)})", xlabel="earlier step k")
        axis.set_xticks(range(len(names)), range(1, len(names) + 1))
        axis.set_yticks(range(len(names)), names if axis is axes[0] else range(1, len(names) + 1))
        figure.colorbar(picture, ax=axis, shrink=0.7)
    axes[2].barh(range(len(names)), share, color="tab:orange")
    axes[2].set(title="AttnSR: share p_k of the budget", yticks=range(len(names)))
    axes[2].set_yticklabels(range(1, len(names) + 1))
    axes[2].invert_yaxis()
    figure.savefig(image, dpi=110)
    pyplot.close(figure)
    return share


def transcript(
    chat: ChatFormat,
    task: Task,
    batch: EpisodeBatch,
    episode: Episode,
    share: np.ndarray | None,
) -> str:
    """The episode in Markdown, exactly as the policy read and wrote it, step by step."""
    tokens = int(np.asarray(batch.trainable).sum())
    lines = [
        f"# {task.id}",
        "",
        f"{episode.status.name} after {len(episode.steps)} steps; {tokens} tokens sampled, "
        f"{int(batching.row_lengths(batch).sum())} in all.",
        "",
    ]
    if share is not None:
        lines += ["![step graph](step_graph.png)", ""]
    for k, step in enumerate(episode.steps):
        start, end = step.observation_span
        shown = step.context_ids[start:end] if k and end else step.context_ids
        credit_share = "" if share is None else f", share of credit {share[k]:.2f}"
        lines += [
            f"## Step {k + 1}: `{step.action}`",
            "",
            f"valid {step.valid}, progress {step.progress:.2f}{credit_share}",
            "",
            "```text",
            chat.decode(shown).strip(),
            "```",
            "",
            "Reply:",
            "",
            "```text",
            chat.decode(step.response_ids).strip(),
            "```",
            "",
        ]
    lines += ["Last observation:", "", "```text", episode.final_observation.strip(), "```", ""]
    return "\n".join(lines)
