"""A small text game: walk to the treasure, around the pit, in at most six moves.

    *2e1n #1e0n>e      two steps east and one north is the treasure; the model moves east, into the pit

    *2e1n #1e0n>n
    *2e0n #1e1s>e
    *1e0n #0e1s>e      treasure found: the reward is 1

The player sees where the treasure (*) and the pit (#) are from its place, on a board of five by five. A move is one
letter: n, e, s or w. A move off the board leaves the player where it is; a step into the pit or any other letter ends
the game. The reward is 1 for the treasure and 0 otherwise, and comes at the end only: nothing says which moves were
good. A player that moves at random finds the treasure in about one game in ten.

No held-out board looks like a training board at the start. The SFT examples have random moves: they show the form of a
move only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from groupwise.config import Recipe
from groupwise.environments import AssistantTurn, Environment, Message, Reply
from groupwise.errors import ConfigError, InputError
from groupwise.tasks.base import Task, TaskRow
from groupwise.text import excerpt

COLUMNS, ROWS = "abcde", "12345"
MOVES = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
MAX_MOVES = 6
NEAR, FAR = 2, 5  # steps from the player to the treasure at the start, without the pit
HELD_OUT_SHARE = 5  # a fifth of the views is held out
HELD_OUT_ROWS, EXAMPLES = 512, 1024


class Board(NamedTuple):
    """Where the player, the treasure and the pit are: (column, row), each from 0 to 4."""

    player: tuple[int, int]
    treasure: tuple[int, int]
    pit: tuple[int, int]

    @property
    def name(self) -> str:
        """The three places, as a row of the data has them: ``b2 d4 c2``."""
        return " ".join(COLUMNS[column] + ROWS[row] for column, row in self)

    @property
    def view(self) -> str:
        """What the player sees: ``*2e2n #1e0n>``."""
        return f"*{self._steps_to(self.treasure)} #{self._steps_to(self.pit)}>"

    def _steps_to(self, place: tuple[int, int]) -> str:
        right, up = place[0] - self.player[0], place[1] - self.player[1]
        return f"{abs(right)}{'w' if right < 0 else 'e'}{abs(up)}{'s' if up < 0 else 'n'}"

    @classmethod
    def parse(cls, name: str) -> Board:
        """The board of a `name`."""
        places = [(COLUMNS.find(part[:1]), ROWS.find(part[1:])) for part in name.split(" ")]
        if len(places) != 3 or any(len(part) != 2 for part in name.split(" ")) or min(map(min, places)) < 0:
            raise InputError(f"a board is written like 'b2 d4 c2', got {excerpt(name)}")
        return cls(*places)

    def move(self, letter: str) -> Board:
        """The board after this move."""
        (column, row), (right, up) = self.player, MOVES[letter]
        place = (column + right, row + up)
        on_board = 0 <= place[0] < len(COLUMNS) and 0 <= place[1] < len(ROWS)
        return self._replace(player=place) if on_board else self


class Game(Environment):
    """The environment: one game at a time."""

    def __init__(self) -> None:
        self.board = Board((0, 0), (4, 4), (2, 2))
        self.moves = 0
        self.won = False

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """The row's prompt is the board, so there is nothing to add."""
        self.board, self.moves, self.won = Board.parse(row["board"]), 0, False
        self.counts = {"in_pit": 0.0, "no_move": 0.0}
        return None

    async def respond(self, turn: AssistantTurn) -> Reply:
        self.moves += 1
        if turn.text not in MOVES:
            self.counts = {"in_pit": 0.0, "no_move": 1.0}
            return Reply(done=True)
        self.board = self.board.move(turn.text)
        self.won = self.board.player == self.board.treasure
        in_pit = self.board.player == self.board.pit
        self.counts = {"in_pit": float(in_pit), "no_move": 0.0}
        if self.won or in_pit or self.moves == MAX_MOVES:
            return Reply(done=True)
        return Reply([{"role": "user", "content": f"\n{self.board.view}"}])

    async def reward(self) -> float:
        return float(self.won)

    def state_key(self) -> tuple[str, int]:
        """Games at the same board with the same number of moves left are in the same state."""
        return self.board.name, self.moves


def boards() -> list[Board]:
    """All boards on which the treasure can be reached in time."""
    places = list(product(range(len(COLUMNS)), range(len(ROWS))))
    return [
        Board(player, treasure, pit)
        for player, treasure, pit in product(places, repeat=3)
        if NEAR <= sum(abs(a - b) for a, b in zip(player, treasure, strict=True)) <= FAR
        and pit not in (player, treasure)
    ]


def rows_of(part: str, seed: int) -> Iterator[TaskRow]:
    """The boards of this part, "train", "held_out" or "examples", in an order of its own, again and again."""
    views = sorted({board.view for board in boards()})
    random.Random("game boards").shuffle(views)  # the same split for every seed
    held_out = set(views[: len(views) // HELD_OUT_SHARE])
    chosen = [board for board in boards() if (board.view in held_out) == (part == "held_out")]
    generator = random.Random(f"game {part} {seed}")
    while True:
        for board in generator.sample(chosen, len(chosen)):
            yield {"prompt": board.view, "board": board.name}


def game_task(recipe: Recipe) -> Task:
    """As many boards as ``[data]`` says, by default every training board once and 512 held-out ones."""
    data, seed = recipe.data, recipe.train.seed
    for key in ("train", "held_out", "held_out_from_train"):
        if getattr(data, key):
            raise ConfigError(
                f"the task 'game' generates its boards, but data.{key} is {getattr(data, key)!r}; leave it out, or set "
                "task to 'rows'"
            )
    letters, examples = random.Random(f"game letters {seed}"), rows_of("examples", seed)
    train, held_out = rows_of("train", seed), rows_of("held_out", seed)
    return Task(
        name="game",
        train=[next(train) for _ in range(data.train_rows or 4 * len(boards()) // HELD_OUT_SHARE)],
        held_out=[next(held_out) for _ in range(data.held_out_rows or HELD_OUT_ROWS)],
        environment=Game,
        examples=[(next(examples)["prompt"], letters.choice("nesw")) for _ in range(EXAMPLES)],
        stop=tuple(MOVES),
        goal=0.8,
    )
