"""Trained agents that play in a window or in a video."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.control.algorithms import GRPOAgent, PPOAgent
from groupwise.control.environments import HELD_OUT
from groupwise.control.models import load_agent
from groupwise.control.utils import AnyArray, SeededGymEnv
from groupwise.errors import ConfigError, ControlError, InputError, MissingExtraError
from groupwise.rundir import write_bytes


def play(paths: Sequence[Path], *, seed: int = HELD_OUT, out: Path | None = None) -> list[float]:
    """Let trained agents play one greedy episode each from the same first state, and return their returns.

    With ``out``, a video of them side by side (.gif or .mp4) is written; without, they play in a window.
    """
    players = [load_agent(path) for path in paths]
    names = sorted({config.environment for config, _ in players})
    if len(names) > 1:
        raise ConfigError(f"runs can only play together on one environment, not on {' and '.join(names)}")
    render_mode = "rgb_array" if out else "human"
    videos = []
    for config, agent in players:
        environment = SeededGymEnv(config.environment, config.options, render_mode=render_mode)
        videos.append(list(_episode(environment, config.algorithm, agent, seed)))
        environment.close()
    if out:
        fps = environment.env.metadata.get("render_fps")
        fps = fps if isinstance(fps, (int, float)) and 0 < fps <= 1000 else 30
        write_video(out, [[(frame, caption) for frame, caption, _ in video] for video in videos], fps)
    return [video[-1][2] for video in videos]


def _episode(
    environment: SeededGymEnv, name: str, agent: GRPOAgent | PPOAgent, seed: int
) -> Iterator[tuple[AnyArray, str, float]]:
    """For each step of a greedy episode: the frame, a caption and the return so far."""
    state, total, done, number = environment.reset(seed=seed), 0.0, False, 0
    frame = environment.render()
    if environment.env.render_mode == "rgb_array" and frame.ndim != 3:
        raise ControlError(f"{environment.name} does not render frames (rgb_array) for a video")
    yield frame, name, total
    while not done:
        action, _ = agent.get_action(state, greedy=True)
        state, reward, terminated, truncated = environment.step(action)
        total, number, done = total + reward, number + 1, terminated or truncated
        yield environment.render(), f"{name}   step {number}   return {total:g}", total


def write_video(path: Path, videos: Sequence[Sequence[tuple[AnyArray, str]]], fps: float) -> None:
    """Write frames with captions, the videos side by side, as .gif or .mp4. A shorter video keeps its last frame."""
    if path.suffix not in (".gif", ".mp4"):
        raise InputError(f"a video's name must end in .gif or .mp4, got {path.name!r}")
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise MissingExtraError("a video", "imageio", "control") from error
    every = max(1, round(fps / 25))  # 25 frames per second are enough, and some viewers slow down at more
    length = max(map(len, videos))
    indices = [*range(0, length - 1, every), length - 1]
    frames = [np.hstack([_captioned(*video[min(index, len(video) - 1)]) for video in videos]) for index in indices]
    frames += [frames[-1]] * round(fps / every)  # show the end for a second
    gif = path.suffix == ".gif"
    timing: dict[str, Any] = {"duration": 1000 * every / fps, "loop": 0} if gif else {"fps": fps / every}
    write_bytes(path, imageio.imwrite("<bytes>", np.stack(frames), extension=path.suffix, **timing))


def _captioned(frame: AnyArray, caption: str, width: int = 400) -> AnyArray:
    """The frame, ``width`` pixels wide, below its caption. Both sides are multiples of 16, as video codecs need."""
    from PIL import Image, ImageDraw, ImageFont

    height = round(frame.shape[0] * width / frame.shape[1])
    canvas = Image.new("RGB", (width, -(-(height + 32) // 16) * 16), "white")
    canvas.paste(Image.fromarray(frame.astype(np.uint8)).resize((width, height)), (0, 32))
    ImageDraw.Draw(canvas).text((8, 7), caption, fill="black", font=ImageFont.load_default(16))
    return np.asarray(canvas)
