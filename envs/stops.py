"""Stop strings as an automaton over ids, so that they are found where ids are sampled.

A stop string may begin and end inside tokens. The automaton's states are the beginnings of the stop
strings that the text so far ends with (Aho and Corasick, 1975); a token moves it by all of the
token's characters at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def stop_table(tokenizer: Any, vocabulary: int, strings: Sequence[str]) -> np.ndarray:
    """Next state for every (state, id): int32 [states, vocabulary]; -1 where a string is complete.

    Responses begin in state 0. Ids that the tokenizer does not know have no text.

    Args:
      tokenizer: a Hugging Face tokenizer.
      vocabulary: number of ids that the policy knows.
      strings: what ends a response.

    Raises:
      ValueError: a string is empty, or not ASCII: characters of several bytes may be split.
    """
    for text in strings:
        if not text or not text.isascii():
            raise ValueError(f"stop string {text!r}: give ASCII text of at least one character")
    states = stop_states(strings)
    number = {state: i for i, state in enumerate(states)}
    letters = set("".join(strings))

    def step(state: str, letter: str) -> str | None:
        """The state after one more character; None if a stop string is complete."""
        text = state + letter
        if any(text.endswith(string) for string in strings):
            return None
        return next(text[i:] for i in range(len(text) + 1) if text[i:] in number)

    after = {(s, c): step(s, c) for s in states for c in letters}

    def run(state: str, piece: str) -> int:
        for letter in piece:
            found = after.get((state, letter), "")
            if found is None:
                return -1
            state = found
        return number[state]

    table = np.zeros((len(states), vocabulary), np.int32)
    for i, piece in enumerate(_pieces(tokenizer, vocabulary)):
        if not piece:
            table[:, i] = range(len(states))
            continue
        if piece[0] in letters:
            table[:, i] = [run(state, piece) for state in states]
        else:  # whatever came before is over
            table[:, i] = run("", piece)
    return table


def stop_states(strings: Sequence[str]) -> list[str]:
    """The automaton's states, as texts: what a response may end with that a stop string begins
    with. State 0 is the empty text."""
    return sorted({text[:n] for text in strings for n in range(len(text))}, key=len)


def _pieces(tokenizer: Any, vocabulary: int) -> list[str]:
    """The text that each id adds when it follows another."""
    anchor = tokenizer.encode("a", add_special_tokens=False)[:1]
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    known = min(vocabulary, len(tokenizer))
    texts = [tokenizer.decode([*anchor, i], skip_special_tokens=False) for i in range(known)]
    return [text[len(before) :] for text in texts] + [""] * (vocabulary - known)
