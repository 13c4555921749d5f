"""From a session's token ids to what a request carries: ids, text, or chat messages; and a conversation's growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from loadtest.errors import BenchError
from loadtest.record import RequestRecord
from loadtest.tokens import TokenIds, TokenSource
from loadtest.workloads.session import Session

PromptForm = Literal["ids", "text", "messages"]
Message: TypeAlias = tuple[str, str]
"""(role, content)"""
Prompt: TypeAlias = TokenIds | str | tuple[Message, ...]
TextOf: TypeAlias = Callable[[TokenIds], str]

# Short, frequent words: about one token each in every English vocabulary.
_WORD_LIST: Final = (
    "the of and to in is you that it he was for on are with as his they be at one have this from or had by hot but"
    " some what there we can out other were all your when up use word how said an each she which do their time if"
    " will way about many then them would write like so these her long make thing see him two has look more day could"
    " go come did my sound no most number who over know water than call first people may down side been now find any"
    " new work part take get place made live where after back little only round man year came show every good me give"
)
_WORDS: Final = tuple(_WORD_LIST.split())


def words_of(token_ids: TokenIds) -> str:
    """Text without a tokenizer: a word an id, so the length in tokens is only about right. Equal ids, equal text."""
    return " ".join([_WORDS[i] for i in (token_ids % len(_WORDS)).tolist()])


def text_maker(tokenizer_folder: Path | None) -> TextOf:
    """Ids to text, by the model's own tokenizer where its folder is given. Raises BenchError when it can't be read."""
    if tokenizer_folder is None:
        return words_of
    # Only text prompts need it, and it is slow to import.
    from common.model.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(tokenizer_folder)
    except Exception as e:
        raise BenchError(f"--tokenizer {tokenizer_folder}: {e}") from e
    return lambda token_ids: tokenizer.decode(token_ids.tolist())


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """
    form: what requests carry. max_model_len: 0 is no limit; else prompts are cut at their end so that prompt and answer
    fit, which keeps shared prefixes shared.
    """

    form: PromptForm
    text_of: TextOf
    source: TokenSource
    max_model_len: int = 0

    def conversation(self, session: Session, key: int) -> Conversation:
        return Conversation(self, session, key)

    def room(self, max_tokens: int) -> int | None:
        """Prompt tokens that fit beside the answer; None where there is no limit."""
        return max(1, self.max_model_len - max_tokens) if self.max_model_len else None


class Conversation:
    """One session as it runs: what has been said so far. Owned by the session's task."""

    def __init__(self, maker: PromptMaker, session: Session, key: int) -> None:
        self._maker = maker
        self._session = session
        self._key = key
        self._ids: list[TokenIds] = [session.system_ids]
        self._messages: list[Message] = []
        if maker.form != "ids" and len(session.system_ids):
            self._messages.append(("system", maker.text_of(session.system_ids)))
        # Whether the last prompt had to be cut.
        self.clipped = False

    def prompt(self, turn: int) -> Prompt:
        """The prompt of `turn`; call once a turn, in order."""
        spec = self._session.turns[turn]
        self.clipped = False
        room = self._maker.room(spec.max_tokens)
        if self._maker.form == "ids":
            self._ids.append(spec.token_ids)
            token_ids = np.concatenate(self._ids)
            if room is not None and len(token_ids) > room:
                self.clipped = True
                token_ids = token_ids[:room]
            return token_ids
        own = spec.token_ids
        if room is not None and len(own) > room:
            self.clipped = True
            own = own[:room]
        self._messages.append(("user", self._maker.text_of(own)))
        if self._maker.form == "messages":
            return tuple(self._messages)
        return " ".join(content for _, content in self._messages)

    def answered(self, turn: int, record: RequestRecord) -> None:
        """Take the answer in. Where the server gave no token ids, ids of the same number stand in for them."""
        if self._maker.form != "ids":
            self._messages.append(("assistant", "".join(record.answer_text)))
            return
        if len(record.answer_ids) == record.output_tokens:
            self._ids.append(np.asarray(record.answer_ids, dtype=np.uint32))
        else:
            source = self._maker.source
            self._ids.append(source.span(source.key("answer", self._key, turn), record.output_tokens))
