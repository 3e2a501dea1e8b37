"""Makes the pictures of the terminal in docs/pictures: runs `groupwise train` in tmux, waits for a state, captures it.

    python tools/terminal_pictures.py [NAME …]

Needs tmux, and chromium to turn the SVG that rich writes into a PNG. A name is that of a picture below, without .png;
by default all of them are made. The runs are kept in a temporary folder.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import TerminalTheme

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SECONDS = 900  # to wait for a state
SCALE = 0.72  # of rich's SVG, whose text has 20 pixels
COLOURS = [(224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194)]
THEME = TerminalTheme(
    (24, 26, 31),
    (208, 212, 220),
    [(60, 64, 72), *COLOURS, (208, 212, 220)],
    [(120, 126, 138), *COLOURS, (240, 242, 246)],
)


@dataclass(frozen=True)
class Picture:
    """A terminal of ``width`` × ``height`` once its text matches ``state``; ``keys`` are sent before."""

    name: str
    width: int
    height: int
    state: str
    keys: str = ""


MIDDLE = r"step 1[2-9]\d/250"
# Each command is run once, and its pictures are taken in this order.
RUNS = {
    "groupwise train quiz": (
        Picture("terminal", 100, 30, MIDDLE),
        Picture("display-120x40", 120, 40, MIDDLE),
        Picture("display-80x24", 80, 24, MIDDLE),
        Picture("display-after-ctrl-c", 80, 24, r"run: \S+\s+\$", keys="C-c"),
    ),
    "groupwise train quiz --evaluate.every 20 --data.held_out_rows 4096": (
        Picture("display-evaluating", 100, 30, r"step +[4-9]\d/[\s\S]*evaluating .* of 4,096 rows.* left"),
    ),
}


def main() -> int:
    names = [picture.name for pictures in RUNS.values() for picture in pictures]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where the pictures are written")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for command, pictures in RUNS.items():
        chosen = [picture for picture in pictures if not arguments.names or picture.name in arguments.names]
        for picture, screen in captured(command, chosen) if chosen else ():
            path = arguments.folder / f"{picture.name}.png"
            write_png(screen, picture.width, command, path)
            print(path, flush=True)
    return 0


def captured(command: str, pictures: Sequence[Picture]) -> Iterator[tuple[Picture, str]]:
    """Run a command, and yield the screen of each picture with its escape sequences."""
    session = f"groupwise-{os.getpid()}"
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as work:
        size = ["-x", str(pictures[0].width), "-y", str(pictures[0].height)]
        tmux("new-session", "-d", "-s", session, *size, "-c", work, "env LANG=C.UTF-8 bash --norc --noprofile")
        try:
            keys(session, f"export PATH={scripts}:$PATH PS1='$ '; clear", "Enter")
            wait_for(r"^\$", session)
            keys(session, command, "Enter")
            for picture in pictures:
                tmux("resize-window", "-t", session, "-x", str(picture.width), "-y", str(picture.height))
                time.sleep(1)  # for the redrawing
                if picture.keys:
                    keys(session, picture.keys)
                wait_for(picture.state, session)
                yield picture, tmux("capture-pane", "-p", "-e", "-t", session)
        finally:
            keys(session, "C-c")
            keys(session, "C-c")
            time.sleep(5)  # the command restores its terminal
            tmux("kill-session", "-t", session)


def keys(session: str, *words: str) -> None:
    tmux("send-keys", "-t", session, *words)


def wait_for(state: str, session: str) -> None:
    end = time.monotonic() + SECONDS
    while not re.search(state, screen := tmux("capture-pane", "-p", "-t", session)):
        if time.monotonic() > end:
            raise SystemExit(f"{state!r} was not seen in {SECONDS} s:\n{screen}")
        time.sleep(0.1)


def tmux(*arguments: str) -> str:
    """The output of a tmux command, on a server of our own."""
    command = ["tmux", "-L", "groupwise-pictures", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_png(screen: str, width: int, title: str, path: Path) -> None:
    """Draw a screen with escape sequences as rich's SVG, and that as a PNG with chromium."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for text in AnsiDecoder().decode(screen.rstrip("\n")):  # the style of a line may begin in the one before
        text.append(" " * (width - cell_len(text.plain)))
        console.print(text, no_wrap=True, overflow="crop", soft_wrap=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        svg = console.export_svg(title=title, theme=THEME)
        # Only local fonts: the picture must not depend on the network.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
        svg = svg.replace("font-size: 20px", "font-size: 21px")  # vertical lines of this font then have no gaps
        found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        if found is None:
            raise SystemExit("rich's SVG has no size")
        across, down = (round(float(number) * SCALE) for number in found.groups())
        page = f'<body style="margin:0;background:transparent"><div style="width:{across}px">{svg}</div></body>'
        (folder / "page.html").write_text(page, encoding="utf-8")
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                "--default-background-color=00000000", "--force-device-scale-factor=1.5",
                f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'picture.png'}",
                f"--window-size={across},{down}", str(folder / "page.html"),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        with Image.open(folder / "picture.png") as image:
            image.quantize(64, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
