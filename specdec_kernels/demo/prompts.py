"""The demo's prompts: two whose answer repeats the prompt, and one whose answer does not."""

_CODE = """import json
from pathlib import Path


def read_config(path):
    with Path(path).open() as file:
        return json.load(file)


def write_config(path, config):
    with Path(path).open("w") as file:
        json.dump(config, file, indent=2)


def merge_config(base, override):
    result = dict(base)
    for key, value in override.items():
        if isinstance(value, dict) and key in result:
            result[key] = merge_config(result[key], value)
        else:
            result[key] = value
    return result
"""

_TEXT = (
    "The lighthouse at the end of the cape was built in 1871 from grey granite blocks carried by ship. For ninety years a "
    "keeper lived there with his family, lit the lamp at dusk and wrote down every vessel that passed. In 1961 the lamp "
    "became electric, the last keeper moved to the village, and the log books were given to the museum, where visitors can "
    "still read them today. The museum is open from April to October, and on the first Sunday of every month a guide climbs "
    "the tower with visitors and explains how the old lens was turned by a clockwork that had to be wound every four hours."
)

#: name -> (message, whether the answer is expected to copy from it)
PROMPTS: dict[str, tuple[str, bool]] = {
    "edit code": (
        f"Edit this code: rename the variable `file` to `stream`. Return the whole code.\n\n```python\n{_CODE}```",
        True,
    ),
    "quote text": (f"Copy the following text exactly, then list its years.\n\n{_TEXT}", True),
    "chat": ("What are some good ways to learn a new language as an adult?", False),
}
