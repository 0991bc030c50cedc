"""A request's body: what the proxy has to understand of it, and what each engine gets.

Values stay the client's own JSON text (`msgspec.Raw`): numbers keep their digits, and a prompt of a
million tokens is copied, not rebuilt.

Pure; any thread.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
from msgspec import Raw

from rd2h.proxy.errors import ErrorKind, ProxyError
from rd2h.proxy.ids import external_ids
from rd2h.wire import Advertisement, DecodeParams, PrefillParams

__all__ = ["Call", "Dispatch", "Endpoint", "Prompt", "parse"]

# Text has about four characters for each token; enough to compare loads by.
CHARACTERS_PER_TOKEN = 4

# A list of numbers, by its first one.
_TOKEN_IDS = re.compile(rb"\[[ \t\n\r]*[-0-9]")

_ONE = Raw(b"1")
_FALSE = Raw(b"false")


class Endpoint(Enum):
    """A generation endpoint: its path, the prefix of its ids, the field that holds the prompt."""

    COMPLETIONS = ("/v1/completions", "cmpl", "prompt")
    CHAT = ("/v1/chat/completions", "chatcmpl", "messages")

    def __init__(self, path: str, prefix: str, field: str) -> None:
        self.path = path
        self.prefix = prefix
        self.field = field


@dataclass(frozen=True)
class Prompt:
    """One prompt: the field that it stands in, its JSON text, its (estimated) tokens."""

    field: str
    text: Raw
    tokens: int


@dataclass(frozen=True)
class Dispatch:
    """One request for P.

    Attributes:
        request_id: P's ``X-Request-Id``.
        body: P's body.
        tokens: Prompt tokens that P will have to compute, estimated.
    """

    request_id: str
    body: bytes
    tokens: int


@dataclass(frozen=True)
class Call:
    """A generation request, understood as far as the proxy must.

    Attributes:
        endpoint: Where it came in.
        fields: The body: field name to JSON text.
        prompts: The prompts in the order in which vLLM numbers them.
        n: Sequences of each prompt.
        remote: Whether D will ask for its prompt; not for a beam search, which vLLM runs without
            a KV connector.
    """

    endpoint: Endpoint
    fields: Mapping[str, Raw]
    prompts: tuple[Prompt, ...]
    n: int
    remote: bool

    @property
    def sequences(self) -> int:
        """How many requests this is for an engine."""
        return len(self.prompts) * self.n

    def expected_ids(self, request_id: str) -> list[str]:
        """The external ids under which D will ask for the prompts; none if it will not."""
        if not self.remote:
            return []
        return self._ids(request_id, len(self.prompts), self.n)

    def decode_body(self, metaserver: str) -> bytes:
        """D's body: the client's, with the place where to ask for the prompt."""
        if not self.remote:
            fields = {k: v for k, v in self.fields.items() if k != "kv_transfer_params"}
            return msgspec.json.encode(fields)
        params = DecodeParams(do_remote_prefill=True, metaserver=metaserver)
        return msgspec.json.encode({**self.fields, "kv_transfer_params": Raw(params.to_json())})

    def whole(self, request_id: str, arrived: Sequence[Advertisement]) -> Dispatch:
        """P's request when D has asked for every prompt: the original one.

        The ids that P makes are D's.
        """
        entries = {ad.request_id: ad for ad in arrived} if self.sequences > 1 else {}
        tokens = sum(prompt.tokens for prompt in self.prompts)
        return Dispatch(request_id, self._prefill_body(arrived[0], entries, {}), tokens)

    def part(self, request_id: str, number: int, arrived: Sequence[Advertisement]) -> Dispatch:
        """P's request number ``number`` when D has asked for only some of the prompts so far.

        P counts the prompts of a list from 0, so its ids differ from D's here: the map is keyed by
        P's ids, and each entry's ``request_id`` is D's.
        """
        position = {ext_id: i for i, ext_id in enumerate(self.expected_ids(request_id))}
        ads = sorted(arrived, key=lambda ad: position[ad.request_id])
        prompts = [self.prompts[position[ad.request_id] // self.n] for ad in ads]
        part_id = f"{request_id}.{number}"
        changed: dict[str, Raw | None]
        if self.endpoint is Endpoint.CHAT:
            # Children of the one conversation.
            changed = {"n": _raw(len(ads))}
            ids = self._ids(part_id, 1, len(ads))
        else:
            # Children of the same prompt become prompts of their own, so that any set can be sent.
            changed = {"n": None, "prompt": None, "prompt_embeds": None}
            for field in {prompt.field for prompt in prompts}:
                changed[field] = _raw([p.text for p in prompts if p.field == field])
            ids = self._ids(part_id, len(ads), 1)
        entries = dict(zip(ids, ads, strict=True))
        # A prompt's children share P's prefix cache: it is computed once.
        tokens = sum(prompt.tokens for prompt in {id(p): p for p in prompts}.values())
        return Dispatch(part_id, self._prefill_body(ads[0], entries, changed), tokens)

    def _ids(self, request_id: str, prompts: int, n: int) -> list[str]:
        chat = self.endpoint is Endpoint.CHAT
        return external_ids(self.endpoint.prefix, request_id, None if chat else prompts, n)

    def _prefill_body(
        self,
        first: Advertisement,
        entries: dict[str, Advertisement],
        changed: Mapping[str, Raw | None],
    ) -> bytes:
        own = {name: getattr(first, name) for name in Advertisement.__struct_fields__}
        params = PrefillParams(**own, batch_kv_transfer_params=entries)
        fields: dict[str, Raw | None] = {**self.fields, **changed}
        fields |= {
            "max_tokens": _ONE,
            "stream": _FALSE,
            # Refused by vLLM without streaming.
            "stream_options": None,
            # Refused by vLLM when it is more than max_tokens.
            "min_tokens": None,
            "kv_transfer_params": Raw(params.to_json()),
        }
        if self.endpoint is Endpoint.CHAT:
            fields["max_completion_tokens"] = _ONE
        return msgspec.json.encode({k: v for k, v in fields.items() if v is not None})


def parse(endpoint: Endpoint, body: bytes, max_sequences: int) -> Call:
    """Read a body as far as the ids and loads need it; the engines judge the rest.

    Raises:
        ProxyError: if it is no JSON object, or what the proxy needs is missing or wrong.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        reason = str(error)
        raise ProxyError(
            ErrorKind.INVALID_JSON, f"the body must be a JSON object: {reason}"
        ) from None
    model = _value(fields, "model")
    if model is None:
        raise ProxyError(ErrorKind.MISSING_FIELD, "you must provide a model", "model")
    if not isinstance(model, str) or not model:
        raise ProxyError(ErrorKind.INVALID_VALUE, "model must be a name", "model")
    if not isinstance(_value(fields, "stream"), bool | None):
        raise ProxyError(ErrorKind.INVALID_VALUE, "stream must be true or false", "stream")
    n = _value(fields, "n")
    if n is None:
        n = 1
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ProxyError(ErrorKind.INVALID_VALUE, "n must be an integer of at least 1", "n")
    prompts = _chat(fields) if endpoint is Endpoint.CHAT else _completion(fields)
    if len(prompts) * n > max_sequences:
        raise ProxyError(
            ErrorKind.INVALID_VALUE,
            f"{len(prompts)} prompts times n = {n} are {len(prompts) * n} sequences; "
            f"this proxy takes at most {max_sequences} in one request",
            "n" if n > 1 else endpoint.field,
        )
    beams = _value(fields, "use_beam_search") is True
    return Call(endpoint, fields, prompts, n, remote=not beams)


def _completion(fields: Mapping[str, Raw]) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    # vLLM numbers embeddings first.
    for name in ("prompt_embeds", "prompt"):
        text = fields.get(name)
        if text is None or _start(text) == b"n":  # null
            continue
        match _start(text):
            case b'"':
                prompts.append(_prompt(name, text))
            case b"[" if _TOKEN_IDS.match(memoryview(text)):
                # Not taken apart: an object for each of a million tokens would stall the loop.
                prompts.append(_prompt(name, text))
            case b"[":
                items = msgspec.json.decode(text, type=list[Raw])
                prompts += [_prompt(name, item) for item in items]
            case _:
                raise ProxyError(
                    ErrorKind.INVALID_VALUE,
                    f"{name} must be a text, a list of texts, of token ids or of lists of them",
                    name,
                )
    if not prompts:
        raise ProxyError(ErrorKind.MISSING_FIELD, "you must provide a prompt", "prompt")
    return tuple(prompts)


def _chat(fields: Mapping[str, Raw]) -> tuple[Prompt, ...]:
    text = fields.get("messages")
    if text is None or _start(text) == b"n":
        raise ProxyError(ErrorKind.MISSING_FIELD, "you must provide messages", "messages")
    if _start(text) != b"[":
        raise ProxyError(ErrorKind.INVALID_VALUE, "messages must be a list", "messages")
    return (_prompt("messages", text),)


def _prompt(field: str, text: Raw) -> Prompt:
    view = memoryview(text)
    if field == "prompt" and _start(text) == b"[":
        tokens = bytes(view).count(b",") + 1
    else:
        tokens = max(1, len(view) // CHARACTERS_PER_TOKEN)
    return Prompt(field, text, tokens)


def _start(text: Raw) -> bytes:
    return bytes(memoryview(text)[:1])


def _value(fields: Mapping[str, Raw], name: str) -> object:
    """A field's value; None if it is missing.

    Raises:
        ProxyError: if it is no valid JSON: what stays raw was only skipped over before.
    """
    text = fields.get(name)
    if text is None:
        return None
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ProxyError(ErrorKind.INVALID_JSON, f"{name}: {error}", name) from None
    return value


def _raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))
