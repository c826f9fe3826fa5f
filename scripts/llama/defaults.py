"""generation_config.json: how a model's makers would have it generate."""

from pathlib import Path
from typing import NamedTuple

from llama.folder import Values, read_json
from llama.sampling import Settings

FILE = "generation_config.json"

#: The default of transformers for a model that samples and names none; 0 means no limit there.
TOP_K = 50


class Defaults(NamedTuple):
    """The settings of a folder's generation_config.json.

    Attributes
    ----------
    settings : Settings
    eos : tuple of int
        Tokens that end a text; empty where the file names none.
    """

    settings: Settings
    eos: tuple[int, ...]


def read_defaults(folder: Path) -> Defaults:
    """Return the file's settings; without one, the likeliest token is taken each time.

    Raises
    ------
    ModelError
        The file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return Defaults(Settings(), ())
    raw = Values(read_json(path), str(path))
    settings = Settings(repetition_penalty=raw.number("repetition_penalty", 1.0))
    if raw.flag("do_sample", False):
        top_k = None if raw.get("top_k") == 0 else raw.integer("top_k", TOP_K)
        settings = settings._replace(
            temperature=raw.number("temperature", 1.0),
            top_k=top_k,
            top_p=raw.number("top_p", 1.0),
        )
    return Defaults(settings, raw.tokens("eos_token_id"))
