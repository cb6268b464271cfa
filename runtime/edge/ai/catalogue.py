"""Which models there are here: the installed ones under their names, and stand-ins under catalogue ids.

This module knows nothing about weights, engines or HTTP.
"""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Iterable, Mapping

import msgspec

from edge.billing.prices import Price, PriceBook
from edge.errors import InvalidModelId, UnknownModel
from edge.weights.manifest import DEFAULT_NAME, DEFAULT_SPEC, Manifest

TEXT_GENERATION = "text-generation"
TEXT_EMBEDDINGS = "text-embeddings"
TEXT_CLASSIFICATION = "text-classification"

_IDS = uuid.UUID("7b1c1d3e-5a0c-5b52-9a63-0f6e3c1f6a11")
"""Namespace of the catalogue's own ids: the same thing has the same id on every node."""


class Task(msgspec.Struct, frozen=True):
    """What models are for, as Workers AI names it."""

    id: str
    name: str
    description: str


def stable_id(name: str) -> str:
    """The id of what has no published one."""
    return str(uuid.uuid5(_IDS, name))


def _task(name: str, description: str, id: str = "") -> Task:
    return Task(id or stable_id(f"task {name}"), name, description)


TASKS = {
    TEXT_GENERATION: _task(
        "Text Generation",
        "Family of generative text models, such as large language models (LLM).",
        "c329a1f9-323d-4e91-b2aa-582dd4188d34",
    ),
    TEXT_EMBEDDINGS: _task(
        "Text Embeddings",
        "Models that turn texts into vectors, which are near each other where the texts are alike.",
        "0137cdcf-162a-4108-94f2-1ca59e8c65ee",
    ),
    TEXT_CLASSIFICATION: _task("Text Classification", "Models that sort texts into classes."),
    "translation": _task("Translation", "Models that translate texts."),
    "summarization": _task("Summarization", "Models that shorten texts."),
    "automatic-speech-recognition": _task("Automatic Speech Recognition", "Models that write down what is said."),
    "text-to-speech": _task("Text-to-Speech", "Models that read texts aloud."),
    "text-to-image": _task("Text-to-Image", "Models that draw texts.", "3d6e1f35-341b-4915-a6c8-9a7142a9033a"),
    "image-to-text": _task("Image-to-Text", "Models that say what a picture shows."),
    "image-classification": _task("Image Classification", "Models that sort pictures into classes."),
    "object-detection": _task("Object Detection", "Models that find things in pictures."),
    "dumb-pipe": _task("Dumb Pipe", "Models that are handed their input as it is, such as turn detection."),
}
"""All tasks of Workers AI by the name that manifests have them under."""
SERVED = frozenset({TEXT_GENERATION, TEXT_EMBEDDINGS, TEXT_CLASSIFICATION})
"""Tasks whose models can be called here."""
_MAX_SHOWN = 5
_MAX_ID_CHARS = 200
_ID = re.compile(r"@(cf|hf)/[^/\s]+/[^/\s]+|[^@\s][^\s]*")


class Model(msgspec.Struct, frozen=True):
    """A model as it can be called: `id` is what callers write, `manifest` is what runs."""

    id: str
    manifest: Manifest
    price: Price | None
    """None: unpriced."""

    @property
    def author(self) -> str:
        """`meta` of `@cf/meta/llama`; installed names have no author of their own."""
        parts = self.id.split("/")
        return parts[1] if len(parts) == 3 else "local"

    @property
    def source(self) -> int:
        """Workers AI's number of the catalogue that the id is of: 2 is `@hf`, 1 is any other."""
        return 2 if self.id.startswith("@hf/") else 1


class Catalogue:
    """All models that can be called on this node."""

    def __init__(self, installed: Iterable[Manifest], stand_ins: Mapping[str, str], prices: PriceBook) -> None:
        """`stand_ins` maps catalogue ids to names of installed models."""
        self.prices = prices
        self._stand_ins: dict[str, str] = {}
        self._models: dict[str, Model] = {}
        self.update(installed, stand_ins)

    def update(self, installed: Iterable[Manifest], stand_ins: Mapping[str, str]) -> None:
        """From now on, these are the models."""
        self._stand_ins = dict(stand_ins)
        manifests = {manifest.name: manifest for manifest in installed}
        served = {name: name for name in manifests} | {
            id: name for id, name in self._stand_ins.items() if name in manifests
        }
        self._models = {
            id: Model(id, manifests[name], self.prices.price(id, name)) for id, name in sorted(served.items())
        }

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of models that are installed, have a stand-in or have a price: others mean nothing in a configuration."""
        return frozenset((*self._models, *self._stand_ins, *self.prices.prices))

    def resolve(self, id: str, *tasks: str) -> Model:
        """The model that callers call `id`, and that is for one of `tasks`, if any are given.

        Raises:
            InvalidModelId: no model could have that id.
            UnknownModel: there is none; the message names the nearest ones and how to add one.
        """
        model = self._models.get(id)
        if model is None and not _ID.fullmatch(id):
            raise InvalidModelId(
                f"{_shortened(id)!r} cannot be the id of a model: those are @cf/AUTHOR/NAME, @hf/AUTHOR/NAME and the "
                "names of installed models (`edge models list`)",
                param="model",
            )
        if model is None:
            raise UnknownModel(self._why_unknown(id), param="model")
        task = model.manifest.task
        if task not in SERVED:
            raise UnknownModel(
                f"model {id!r} is for the task {task!r}, which is not supported yet; "
                "`edge models list` shows the task of each",
                param="model",
            )
        if tasks and task not in tasks:
            wanted = " or ".join(TASKS[each].name for each in tasks)
            others = [each.id for each in self.models() if each.manifest.task in tasks][:_MAX_SHOWN]
            raise UnknownModel(
                f"model {id!r} is for {TASKS[task].name}, and this is a call for {wanted}: "
                + (f"use {' or '.join(others)}" if others else "no model for that is installed"),
                param="model",
            )
        return model

    def models(self, *, search: str = "", task: str = "", author: str = "", source: int | None = None) -> list[Model]:
        """The models that can be called and whose id contains `search`, of that task, author and source.

        A task is a name, an id or a slug. What is empty or None does not choose, and case does not matter.
        """
        return [
            model
            for model in self._models.values()
            if model.manifest.task in SERVED
            and search.lower() in model.id.lower()
            and author.lower() in ("", model.author.lower())
            and task.lower() in ("", *_task_names(model.manifest.task))
            and source in (None, model.source)
        ]

    def _why_unknown(self, id: str) -> str:
        stand_in = self._stand_ins.get(id)
        if stand_in is not None:
            return (
                f"model {id!r} is served by {stand_in!r} ([ai.models] in the configuration), which is not installed. "
                f"Install it: edge models add {DEFAULT_SPEC if stand_in == DEFAULT_NAME else 'SPEC'}"
            )
        shown = _shortened(id)
        if not self._models:
            return f"no model {shown!r}: none is installed. The small default model: edge models add {DEFAULT_SPEC}"
        ways = "See `edge models list`; add one with `edge models add SPEC`"
        if id.startswith("@"):  # of somebody else's catalogue: nothing to install under that name, but to map
            ways += f', or let an installed one stand in: "{shown}" = "NAME" under [ai.models] in the configuration'
        return f"no model {shown!r}; {self._nearest(shown)} {ways}"

    def _nearest(self, id: str) -> str:
        """The nearest ids, judged by the whole id and by its last part, which is what people misspell."""
        last_parts: dict[str, str] = {}
        for known in self._models:
            last_parts.setdefault(known.rpartition("/")[2], known)
        close = difflib.get_close_matches(id, self._models, n=3) + [
            last_parts[part] for part in difflib.get_close_matches(id.rpartition("/")[2], last_parts, n=3)
        ]
        if close:
            return f"did you mean {' or '.join(dict.fromkeys(close))}?"
        known_ids = list(self._models)
        more = f" and {len(known_ids) - _MAX_SHOWN} more" if len(known_ids) > _MAX_SHOWN else ""
        return f"there are {', '.join(known_ids[:_MAX_SHOWN])}{more}."


def _task_names(slug: str) -> tuple[str, ...]:
    return slug, TASKS[slug].name.lower(), TASKS[slug].id


def _shortened(id: str) -> str:
    return id if len(id) <= _MAX_ID_CHARS else id[:_MAX_ID_CHARS] + "…"
