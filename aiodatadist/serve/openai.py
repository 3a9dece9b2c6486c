"""OpenAI's shapes: what clients may ask of ``/v1/completions`` and ``/v1/chat/completions``, and what they get."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Final, Literal

import msgspec

from .errors import ServeError
from .protocol import Generation, Sampling
from .text import Piece

__all__ = ["DEFAULT_MAX_TOKENS", "DONE", "Answer", "error_event", "models", "read_request"]

DEFAULT_MAX_TOKENS: Final = {"completion": 16, "chat": 256}
DONE: Final = b"data: [DONE]\n\n"
_MOST_STOPS: Final = 16


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Turn(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Beyond OpenAI's, under the names that others use.
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Taken only with the value that changes nothing.
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Turn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


def read_request(body: bytes, *, chat: bool) -> Generation:
    """Read and check a client's request, and give it an id and a seed.

    Raises
    ------
    ServeError
        ``invalid_request`` or ``unsupported``, with the field in `param`.
    """
    try:
        asked = msgspec.json.decode(body, type=_Chat if chat else _Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        at = re.search(r"`\$\.?(\w*)|field `(\w+)`", str(why))
        raise ServeError("invalid_request", str(why), param=(at and (at[1] or at[2])) or None) from why
    _refuse_unsupported(asked)
    prompt: str | list[int] | None = None
    turns: list[tuple[str, str]] = []
    limit, field = asked.max_tokens, "max_tokens"
    if isinstance(asked, _Chat):
        if asked.max_completion_tokens is not None:
            limit, field = asked.max_completion_tokens, "max_completion_tokens"
        turns = [(turn.role, _text(turn)) for turn in asked.messages]
        if not turns:
            raise ServeError("invalid_request", "messages is empty", param="messages")
    else:
        prompt = _one_prompt(asked.prompt)
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    _check(len(stop) <= _MOST_STOPS, "stop", len(stop), f"at most {_MOST_STOPS} strings")
    _check(all(stop), "stop", "''", "strings that are not empty")
    _check(limit is None or limit >= 1, field, limit, "at least 1")
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    _check(0 <= temperature <= 2, "temperature", temperature, "0 to 2")
    _check(0 < top_p <= 1, "top_p", top_p, "above 0, to 1")
    seed = secrets.randbits(53) if asked.seed is None else asked.seed
    _check(-(2**63) <= seed < 2**64, "seed", seed, "a 64-bit integer")
    options = asked.stream_options
    return Generation(
        request_id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        model=asked.model,
        created=int(time.time()),
        prompt=prompt,
        turns=turns,
        max_tokens=limit,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed, ignore_end=bool(asked.ignore_eos)),
        stop=stop,
        stream=bool(asked.stream),
        include_usage=bool(options and options.include_usage),
        return_token_ids=bool(asked.return_token_ids),
    )


def _check(good: bool, param: str, value: object, limit: str) -> None:
    if not good:
        raise ServeError("invalid_request", f"{param} is {value!r}; give {limit}", param=param)


def _refuse_unsupported(asked: _Completion | _Chat) -> None:
    neutral: dict[str, tuple[object, ...]] = {
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
        "tools": ([],),
        "response_format": ({"type": "text"},),
    }
    for name, allowed in neutral.items():
        value = getattr(asked, name, None)
        # `is` beside `==`: logprobs=0 of a completion asks for something, although 0 == False.
        if value is not None and not any(type(value) in (type(each), float) and value == each for each in allowed):
            raise ServeError("unsupported", f"{name}={value!r} is not supported here", param=name)


def _text(turn: _Turn) -> str:
    if turn.content is None or isinstance(turn.content, str):
        return turn.content or ""
    for part in turn.content:
        if part.type != "text":
            raise ServeError("unsupported", f"content of type {part.type!r} is not supported here", param="messages")
    return "".join(part.text for part in turn.content)


def _one_prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ServeError("unsupported", f"{len(prompt)} prompts in one request are not supported", param="prompt")
        (only,) = prompt
        prompt = only
    if not prompt:
        raise ServeError("invalid_request", "prompt is empty", param="prompt")
    return prompt


def token_limit(generation: Generation) -> int:
    """Return the most new tokens that were asked for, in words or by silence."""
    if generation.max_tokens is not None:
        return generation.max_tokens
    return DEFAULT_MAX_TOKENS["chat" if generation.chat else "completion"]


class Answer:
    """Writes an answer, streamed or whole.

    Parameters
    ----------
    generation : Generation
    prompt_tokens, cached_tokens : int
        For the usage.
    """

    def __init__(self, generation: Generation, prompt_tokens: int, cached_tokens: int) -> None:
        self._generation = generation
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._completion_tokens = 0
        self._begun = False

    @property
    def content_type(self) -> str:
        """The media type."""
        return "text/event-stream" if self._generation.stream else "application/json"

    def event(self, piece: Piece) -> bytes:
        """Return the event of a piece; empty if there is nothing to say."""
        asked = self._generation
        self._completion_tokens += len(piece.tokens)
        if not (piece.text or piece.finish or not self._begun or (asked.return_token_ids and piece.tokens)):
            return b""
        choice: dict[str, Any] = {"index": 0, "finish_reason": piece.finish, "logprobs": None}
        if asked.chat:
            delta: dict[str, str] = {} if self._begun else {"role": "assistant"}
            if piece.text or not self._begun:
                delta["content"] = piece.text
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
        if asked.return_token_ids:
            choice["token_ids"] = piece.tokens
        self._begun = True
        return self._event({"choices": [choice]})

    def last(self) -> bytes:
        """Return what comes behind the last piece."""
        if self._generation.include_usage:
            return self._event({"choices": [], "usage": self._usage()}) + DONE
        return DONE

    def whole(self, pieces: list[Piece]) -> bytes:
        """Return the answer of a request that is not streamed."""
        asked = self._generation
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        self._completion_tokens = len(tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].finish, "logprobs": None}
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if asked.return_token_ids:
            choice["token_ids"] = tokens
        name = "chat.completion" if asked.chat else "text_completion"
        return msgspec.json.encode({**self._head(name), "choices": [choice], "usage": self._usage()})

    def _head(self, name: str) -> dict[str, Any]:
        asked = self._generation
        return {"id": asked.request_id, "object": name, "created": asked.created, "model": asked.model}

    def _event(self, body: dict[str, Any]) -> bytes:
        name = "chat.completion.chunk" if self._generation.chat else "text_completion"
        return b"data: " + msgspec.json.encode({**self._head(name), **body}) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def error_event(error: ServeError) -> bytes:
    """Return the event that ends a stream which has begun well; no ``[DONE]`` follows it."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


def models(names: list[str]) -> dict[str, Any]:
    """Return the answer of ``/v1/models``."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "aiodatadist"} for name in sorted(names)],
    }
