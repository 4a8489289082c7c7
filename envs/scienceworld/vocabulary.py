"""Words of ScienceWorld's texts, for a small word-level tokenizer.

The engine composes its texts from names in its code, so nobody can list them all. words.txt next
to this file holds the words that were met on the training split: `python -m
envs.scienceworld.vocabulary` plays gold paths, looks into every room, and writes it anew. A word
that is not in it becomes the tokenizer's unknown word; a test bounds how many of a development
game's words do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from envs.scienceworld import gold, jvm
from envs.scienceworld.tasks import KINDS, variations

WORDS = Path(__file__).with_name("words.txt")
MOST = 200  # whole numbers up to here, for temperatures and counts
PUNCTUATION = ".,:;!?'\"()[]-=/<>"
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_ROOMS = re.compile(r"(?:door to|teleport to) (?:the )?([a-z ]+?)(?: \(|$)", re.MULTILINE)
PLAYED, READ = 3, 40  # training variations per kind: gold paths played, first texts read


def split(text: str) -> list[str]:
    """The words of a text, in lower case and in order, cut as the tokenizer cuts them."""
    return _WORD.findall(text.lower())


@functools.cache
def words() -> list[str]:
    """Sorted list of the words, numbers 0 to `MOST`, and punctuation."""
    listed = WORDS.read_text(encoding="utf-8").split()
    return sorted({*listed, *PUNCTUATION, *map(str, range(MOST + 1))})


def collect(java: jvm.Jvm, cache: Path) -> Iterator[str]:
    """Texts of the training split."""
    interface = java.interface()
    call = interface.call
    for kind in KINDS:
        numbers = variations(kind, "train")
        for number in numbers[:: max(1, len(numbers) // READ)]:
            call("load", kind, number, "easy", False)
            yield from (call("getTaskDescription"), call("freeActionLook"))
        for number in numbers[:: max(1, len(numbers) // PLAYED)][:PLAYED]:
            path = gold.gold_path(java, f"{kind}/{number}", "easy", cache)
            call("load", kind, number, "easy", False)
            yield from path
            for action in path:
                yield call("step", action)
                yield call("freeActionLook")
                yield call("freeActionInventory")
                if call("getCompleted"):
                    break
            seen: set[str] = set()
            rooms = ["hallway", "kitchen"]
            while rooms:
                room = rooms.pop()
                if room not in seen:
                    seen.add(room)
                    yield call("step", f"teleport to {room}")
                    look = call("freeActionLook")
                    yield look
                    yield " ".join(call("getPossibleObjects"))
                    rooms += _ROOMS.findall(look)


def main() -> None:
    """Write words.txt anew."""
    found = {
        word
        for text in collect(jvm.Jvm(jvm.OPTIONS), gold.folder())
        for word in split(text)
        if not word.isdigit() and word not in PUNCTUATION
    }
    answers = "ambiguous request please enter the number for action you intended or blank to cancel"
    refusals = "no known action matches that input unknown type help for a list of actions objects"
    kept = found | set(split(f"{answers} {refusals} possible object referents and"))
    WORDS.write_text("\n".join(sorted(kept)) + "\n", encoding="utf-8")
    print(f"{len(kept)} words in {WORDS}")


if __name__ == "__main__":
    main()
