"""The text game: its boards, its rules, and what a player at random gets."""

from __future__ import annotations

import asyncio
import random
from itertools import islice

import pytest

from groupwise.config import make_recipe
from groupwise.environments import AssistantTurn
from groupwise.errors import ConfigError, InputError
from groupwise.tasks.game import EXAMPLES, FAR, MAX_MOVES, MOVES, NEAR, Board, Game, boards, game_task, rows_of


def play(board: str, moves: str) -> tuple[float, list[str], dict[str, float]]:
    """The reward, what was shown after each move, and the counts."""

    async def all_moves() -> tuple[float, list[str], dict[str, float]]:
        game, shown = Game(), []
        assert await game.start({"board": board}, 0) is None
        for move in moves:
            reply = await game.respond(AssistantTurn(move))
            shown += ["done"] if reply.done else [message["content"] for message in reply.messages]
            if reply.done:
                break
        return await game.reward(), shown, dict(game.counts)

    return asyncio.run(all_moves())


def test_a_treasure_is_found():
    reward, shown, counts = play("b2 d4 c2", "nene")
    assert reward == 1.0
    assert shown == ["\n*2e1n #1e1s>", "\n*1e1n #0e1s>", "\n*1e0n #0e2s>", "done"]
    assert counts == {"in_pit": 0.0, "no_move": 0.0}


def test_a_pit_ends_the_game():
    assert play("b2 d4 c2", "en") == (0.0, ["done"], {"in_pit": 1.0, "no_move": 0.0})


@pytest.mark.parametrize("text", ["x", "", "ne", "N", " n"])
def test_anything_else_is_no_move(text):
    game = Game()
    asyncio.run(game.start({"board": "b2 d4 c2"}, 0))
    assert asyncio.run(game.respond(AssistantTurn(text))).done
    assert game.counts["no_move"] == 1
    assert asyncio.run(game.reward()) == 0.0


def test_a_move_off_the_board_stays_and_counts():
    reward, shown, _ = play("a1 c2 e5", "wswsws")
    assert shown == ["\n*2e1n #4e4n>"] * (MAX_MOVES - 1) + ["done"]
    assert reward == 0.0


def test_the_last_move_may_win():
    assert play("a1 b1 e5", "wwwwwe")[0] == 1.0
    assert play("a1 b1 e5", "wwwwwwe")[0] == 0.0


def test_a_game_can_be_started_again():
    game = Game()
    for _ in range(2):
        asyncio.run(game.start({"board": "a1 b1 e5"}, 0))
        assert asyncio.run(game.reward()) == 0.0
        asyncio.run(game.respond(AssistantTurn("e")))
        assert asyncio.run(game.reward()) == 1.0


def test_the_view_is_from_the_players_place():
    assert Board.parse("b2 d4 c2").view == "*2e2n #1e0n>"
    assert Board.parse("d4 b2 d1").view == "*2w2s #0e3s>"
    assert {len(board.view) for board in boards()} == {12}


def test_boards_and_their_texts():
    every = boards()
    assert len(set(every)) == len(every)
    for board in random.Random(0).sample(every, 200):
        assert Board.parse(board.name) == board
        assert NEAR <= sum(abs(a - b) for a, b in zip(board.player, board.treasure, strict=True)) <= FAR <= MAX_MOVES
        assert board.pit not in (board.player, board.treasure)


@pytest.mark.parametrize("text", ["", "b2 d4", "b2 d4 c2 c3", "f2 d4 c2", "b6 d4 c2", "b2x d4 c2", "*2e1n #1e0n>"])
def test_what_is_no_board_is_refused(text):
    with pytest.raises(InputError, match="a board is written like"):
        Board.parse(text)


def test_held_out_boards_are_others():
    seen = {
        part: {row["board"] for row in islice(rows_of(part, 1), 12_000)} for part in ("train", "held_out", "examples")
    }
    assert not seen["train"] & seen["held_out"]
    assert not seen["examples"] & seen["held_out"]
    assert len(seen["train"] | seen["held_out"]) == len(boards())
    views = {part: {Board.parse(name).view for name in names} for part, names in seen.items()}
    assert not views["train"] & views["held_out"]
    again = {row["board"] for row in islice(rows_of("held_out", 2), 12_000)}
    assert again == seen["held_out"]  # for every seed


def test_the_task():
    task = game_task(make_recipe({"task": "game", "data": {"train_rows": 20, "held_out_rows": 7}}))
    assert (len(task.train), len(task.held_out), len(task.examples)) == (20, 7, EXAMPLES)
    assert set(task.stop) == set(MOVES) == {letter for _, letter in task.examples}
    assert task.environment is Game
    with pytest.raises(ConfigError, match="generates its boards"):
        game_task(make_recipe({"task": "game", "data": {"train": "rows.jsonl"}}))


def test_a_player_at_random_wins_about_one_game_in_ten():
    chance, wins, games = random.Random(0), 0, 5000
    every = boards()
    for _ in range(games):
        board = chance.choice(every)
        for _ in range(MAX_MOVES):
            board = board.move(chance.choice("nesw"))
            if board.player in (board.treasure, board.pit):
                break
        wins += board.player == board.treasure
    assert 0.08 < wins / games < 0.12
