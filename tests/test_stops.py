"""Stop strings as automata over ids, against looking for them in the decoded text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from envs.stops import stop_table
from envs.tokenizer import word_tokenizer


def byte_tokenizer():
    """A small byte-level BPE, whose tokens cut the stop strings anywhere."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = ["<action>go up</action> </act >></action>\n é日本 x</action>y aactactaction"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("strings", [["</action>"], ["act", "</a", "aca"]])
def test_the_automaton_stops_where_the_text_first_holds_a_string(kind, strings):
    words = "go up </action> act </a aca < / a c t > on".split()
    tokenizer = byte_tokenizer() if kind == "bytes" else word_tokenizer(words)
    size = len(tokenizer) + 5  # a policy may know more ids than its tokenizer
    table = stop_table(tokenizer, size, strings)
    assert table.shape[1] == size
    rng = np.random.default_rng(0)
    ends = set()
    for _ in range(600):
        ids: list[int] = []
        while len(ids) < 12:  # pieces of the strings, and anything
            text = str(rng.choice(strings))
            cut = int(rng.integers(len(text)))
            for piece in (text[:cut], text[cut:]) if rng.random() < 0.7 else (text[cut:],):
                ids += tokenizer.encode(piece, add_special_tokens=False)
            ids.append(int(rng.integers(len(tokenizer))))
        ids = ids[:12]
        state, end = 0, None
        for at, token in enumerate(ids):
            state = int(table[state, token])
            if state < 0:
                end = at
                break
        prefixes = [tokenizer.decode(ids[: n + 1], skip_special_tokens=False) for n in range(12)]
        want = next((n for n, t in enumerate(prefixes) if any(s in t for s in strings)), None)
        assert end == want, prefixes[-1]
        ends.add(end)
    assert len(ends) > 6, "the strings come up at few places"
    assert (table[:, len(tokenizer) :] == np.arange(len(table))[:, None]).all()


@pytest.mark.parametrize("text", ["", "endé"])
def test_a_string_that_cannot_be_found_is_refused(text):
    with pytest.raises(ValueError, match="ASCII"):
        stop_table(word_tokenizer(["a"]), 10, [text])
